// The conversation: sends it to /v1/chat/completions and shows the answer as it streams.

export class Chat {
  #messages = [];
  #abort = null;
  #current = null; // the answer that streams: id, text, what of it is said, element

  constructor(history) {
    this.history = history;
    this.ids = new Set();
    this.log = document.getElementById("log");
    this.form = document.getElementById("ask-form");
    this.input = document.getElementById("ask");
    this.stopButton = document.getElementById("stop");
    this.sendButton = document.getElementById("send");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    this.stopButton.addEventListener("click", () => this.#abort?.abort());
    document.getElementById("forget").addEventListener("click", () => this.#forget());
  }

  isMine(id) {
    return this.ids.has(id);
  }

  // Words in their colours, where the feed and the stream agree on the text.
  colour() {
    const answer = this.#current;
    if (!answer || answer.shown === answer.text) return;
    const words = this.history.answers.get(answer.id)?.words ?? [];
    const told = words.map(([word]) => word).join("");
    const isSame = answer.text && told.startsWith(answer.text.trimEnd());
    if (!isSame) {
      answer.element.textContent = answer.text;
    } else {
      answer.element.replaceChildren(...words.filter(([word]) => word !== "<|im_end|>").map(span));
    }
    answer.shown = answer.text;
    this.log.scrollTop = this.log.scrollHeight;
  }

  async #send() {
    const question = this.input.value.trim();
    if (!question || this.#abort) return;
    this.input.value = "";
    this.log.querySelector(".hint")?.remove();
    this.#show("user", question);
    this.#messages.push({ role: "user", content: question });
    const element = this.#show("answer", "");
    this.#current = { id: null, text: "", said: "", element };
    this.#abort = new AbortController();
    this.stopButton.disabled = false;
    this.sendButton.disabled = true;
    const started = performance.now();
    let usage = null;
    try {
      for await (const chunk of this.#stream()) {
        usage = chunk.usage ?? usage;
        this.#current.id ??= `${chunk.id}-0`;
        this.ids.add(this.#current.id);
        const delta = chunk.choices[0]?.delta ?? {};
        this.#current.said += delta.content ?? "";
        this.#current.text += (delta.reasoning_content ?? "") + (delta.content ?? "");
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#show("fault", error.message);
    }
    this.#current.shown = null;
    this.colour();
    this.#messages.push({ role: "assistant", content: this.#current.said });
    this.#show("count", figures(usage, (performance.now() - started) / 1e3));
    document.getElementById("said").textContent = this.#current.text;
    this.#current = null;
    this.#abort = null;
    this.stopButton.disabled = true;
    this.sendButton.disabled = false;
    this.log.scrollTop = this.log.scrollHeight;
    this.input.focus();
  }

  async *#stream() {
    const body = {
      messages: this.#messages,
      temperature: Number(document.getElementById("temperature").value),
      max_tokens: 512,
      stream: true,
      stream_options: { include_usage: true },
    };
    if (!document.getElementById("drafts").checked) body.speculation = { max_draft: 0 };
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      // behind replicas: to the one whose feed this page shows
      headers: { "Content-Type": "application/json", "X-Dspark-Watched": "1" },
      body: JSON.stringify(body),
      signal: this.#abort.signal,
    });
    if (!answer.ok) throw new Error(await reason(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  }

  #forget() {
    this.#abort?.abort();
    this.#messages = [];
    this.log.replaceChildren();
    this.input.focus();
  }

  #show(kind, words) {
    const found = document.createElement(kind === "answer" ? "div" : "p");
    found.className = kind;
    found.textContent = words;
    this.log.append(found);
    this.log.scrollTop = this.log.scrollHeight;
    return found;
  }
}

function span([word, origin]) {
  const found = document.createElement("span");
  found.className = `word ${origin}`;
  found.textContent = word;
  return found;
}

async function reason(answer) {
  const said = await answer.json().catch(() => null);
  return said?.error?.message ?? `The server answered with status ${answer.status}.`;
}

function figures(usage, seconds) {
  if (!usage) return "stopped";
  const { rounds, accepted_tokens: accepted } = usage.speculation ?? {};
  const tokens = usage.completion_tokens;
  const share = rounds ? `, ${((tokens - 1) / rounds).toFixed(2)} a step, ${accepted} of them guessed` : "";
  return `${tokens} tokens, ${(tokens / seconds).toFixed(0)} a second${share}`;
}
