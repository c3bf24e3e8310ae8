"""Toy tokenizers: the two kinds in use, real and small, saved like a model's own."""

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = ("the end of the story", "END of text", "hello world", "naïve café", "日本語 text")
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|stop|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SENTENCEPIECE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('No system role here') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
)


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|start|>", "<|stop|>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return backend


def sentencepiece_backend() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzEND", "▁t", "▁th", "▁the", "▁▁", "é", "日"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return backend


def save_byte_level(path: Path) -> None:
    """Write the tokenizer files of a ChatML model with a byte-level vocabulary of 301 ids."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<|start|>", eos_token="<|stop|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)


def save_sentencepiece(path: Path) -> None:
    """Write the tokenizer files of a model with word marks, byte fallback and a BOS token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_backend(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = SENTENCEPIECE_TEMPLATE
    tokenizer.save_pretrained(path)
