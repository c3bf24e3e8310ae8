"""A frozen Hugging Face causal LM over flattened tokens, with taps. It knows no request."""

import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dspark.core import AttentionLayout
from dspark.errors import ModelError
from dspark.kernels.linear import PackedLinear, replace_linears
from dspark.kernels.rounds import RoundTable
from dspark.kernels.stack import StackVerdict
from dspark.models import attention, smoothing
from dspark.models.attention import AttentionProbe, KVPages
from dspark.models.fusion import FusedLayer, fuse_layer, fuse_norm
from dspark.models.target_source import load_model
from dspark.models.target_spec import (
    decoder_layers,
    head_scale_of,
    probe_of,
    refuse_unsupported,
    spec_of,
    text_config_of,
)
from dspark.models.target_stack import TargetStack


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """`hidden_ND`: last hidden state after the final norm. `taps_NM`: the tapped outputs.

    `logits_NV`: what `Target.logits` makes of all hidden states, if they were asked for.
    """

    hidden_ND: Tensor
    taps_NM: Tensor
    logits_NV: Tensor | None = None


class Target:
    """Runs the model; weights never change. Build it with `Target.load` or `Target.wrap`."""

    def __init__(self, model: PreTrainedModel, *, name: str) -> None:
        self.model = model
        self._base: nn.Module = model.base_model
        self._embedding: nn.Module = model.get_input_embeddings()
        self._device: torch.device = self._embedding.weight.device  # asked for several times a step
        self._layers: nn.ModuleList = decoder_layers(model)
        self._tapped: dict[int, Tensor] = {}
        self._bound: KVPages | None = None
        self._stack: TargetStack | None = None
        self.kv_dtype: torch.dtype = self.dtype
        """Of the keys and values in `allocate_pages`: the arithmetic's, or int8."""
        self._decodes = False
        probe, logits = probe_of(model)
        self._attention_modules = probe.modules
        self.softcap: float | None = text_config_of(model.config).get("final_logit_softcapping")
        self.head_scale = head_scale_of(model.config)
        self._head_factors_D: Tensor | None = None  # the head's weight is multiplied by them
        # a drafter needs its rows after the layer itself was packed
        self._head_weight_VD: Tensor = model.get_output_embeddings().weight.detach()
        self.spec = spec_of(model, name=name, probe=probe)
        self._install_taps()
        self._check_head(logits)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        compile: bool = False,
        quantization: str | None = None,
        kv_dtype: torch.dtype | None = None,
        packed: bool = True,
        trust_remote_code: bool = False,
    ) -> "Target":
        """A target from a directory, a hub name, a GGUF file, or the name of an embedded one.

        `packed` swaps the linear layers for `kernels.linear.PackedLinear` on a CPU. `kv_dtype`:
        of keys and values, `None` is `dtype`.
        Raises `ModelError` for a missing, unreadable or unsupported model.
        """
        model = load_model(source, dtype=dtype, trust_remote_code=trust_remote_code)
        target = cls.wrap(model.to(device), name=str(source))
        if packed and torch.device(device).type == "cpu":
            target.fuse()
            target.pack(quantization=quantization, kv_dtype=kv_dtype)
        elif kv_dtype is not None:
            target.kv_dtype = kv_dtype
        if compile:
            target.compile()
        return target

    @classmethod
    def wrap(cls, model: PreTrainedModel, *, name: str = "model") -> "Target":
        """A target around a model in memory; its attention is switched to the paged one."""
        refuse_unsupported(model.config)
        attention.register()
        model.set_attn_implementation(attention.ATTENTION_NAME)
        model.requires_grad_(requires_grad=False)
        return cls(model.eval(), name=name)

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's own configuration, as transformers stores it."""
        return text_config_of(self.model.config)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic's type."""
        return self.embed_weight_VD.dtype

    @property
    def has_int8_cache(self) -> bool:
        """Whether keys and values are kept as int8."""
        return self.kv_dtype == torch.int8

    @property
    def embed_weight_VD(self) -> Tensor:
        """The input embedding, without a model's scale (see `embed`)."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @property
    def head_weight_VD(self) -> Tensor:
        """The LM head; the embedding where they are tied."""
        return self._head_weight_VD

    def embed(self, ids_N: Tensor) -> Tensor:
        """Embeddings as the first layer gets them, [N, D]."""
        embedded: Tensor = self._embedding(ids_N)
        return embedded

    def allocate_pages(self, *, num_pages: int, page_size: int) -> KVPages:
        """Pages for this target's layers on its device."""
        return KVPages.allocate(
            self.spec.layer_shapes,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def forward(
        self,
        input_ids_N: Tensor,
        *,
        layout: AttentionLayout,
        pages: KVPages,
        tap_layers: Sequence[int],
        has_logits: bool = False,
    ) -> TargetOutput:
        """One pass over the flattened tokens of all requests; writes their K/V into `pages`.

        `has_logits`: of every token, in the same call where the head is part of the stack.
        `tap_layers`: rising ids of layers whose output is wanted, -1 for the embeddings
        (DeepSpec's convention), the number of layers for the last hidden state after the norm.
        """
        if self._stack is None:
            return self._by_layers(input_ids_N, layout, pages, tap_layers, has_logits=has_logits)
        inner = [i for i in tap_layers if i < self.spec.num_layers]
        hidden_ND, taps_NM, logits_NV = self._stack.run(
            input_ids_N if self._stack.has_embedding else self.embed(input_ids_N),
            layout=layout,
            pages=pages,
            tap_layers=inner,
            has_logits=has_logits and self._stack.has_head,
        )
        if len(inner) < len(tap_layers):
            taps_NM = torch.cat((taps_NM, hidden_ND), dim=-1)
        if logits_NV is not None:
            logits_NV = self._finish_logits(logits_NV)
        elif has_logits:
            logits_NV = self.logits(hidden_ND)
        return TargetOutput(hidden_ND=hidden_ND, taps_NM=taps_NM, logits_NV=logits_NV)

    @property
    def can_decode(self) -> bool:
        """Whether `decode` can run this model: nothing comes between its head and a verdict."""
        return self._decodes

    def decode(
        self,
        ids: Sequence[int],
        runs: Sequence[tuple[int, int, int]],
        *,
        table: Tensor,
        pages: KVPages,
        tap_layers: Sequence[int],
        rounds: RoundTable,
        has_states: bool,
        **drafts: Any,
    ) -> StackVerdict:
        """One pass and the verdict on it in one call, see `FusedStack.decode`.

        An id outside the vocabulary is read as the nearest one inside: it never indexes the
        embedding (UC-009).
        """
        assert self._stack is not None
        last = self.spec.vocab_size - 1
        inner = [i for i in tap_layers if i < self.spec.num_layers]
        verdict = self._stack.decode(
            [min(max(i, 0), last) for i in ids],
            runs,
            table=table,
            pages=pages,
            tap_layers=inner,
            rounds=rounds,
            has_states=has_states,
            **drafts,
        )
        if verdict.states is None or len(inner) == len(tap_layers):
            return verdict
        states = verdict.states
        taps_NM = torch.cat((states.taps_NM, states.hidden_ND), dim=-1)
        return verdict._replace(states=states._replace(taps_NM=taps_NM))

    @torch.no_grad()
    def _by_layers(
        self,
        input_ids_N: Tensor,
        layout: AttentionLayout,
        pages: KVPages,
        tap_layers: Sequence[int],
        *,
        has_logits: bool,
    ) -> TargetOutput:
        self._bind(pages)
        self._tapped.clear()
        hidden_ND = self._run(input_ids_N, layout.positions_N, **attention.layout_arguments(layout))
        self._tapped[self.spec.num_layers] = hidden_ND[None]
        taps = [self.embed(input_ids_N) if i < 0 else self._tapped[i][0] for i in tap_layers]
        self._tapped.clear()
        empty = hidden_ND.new_empty((hidden_ND.shape[0], 0))
        return TargetOutput(
            hidden_ND=hidden_ND,
            taps_NM=torch.cat(taps, dim=-1) if taps else empty,
            logits_NV=self.logits(hidden_ND) if has_logits else None,
        )

    @torch.no_grad()
    def logits(self, hidden_MD: Tensor) -> Tensor:
        """LM head with the model's own scale and soft-cap, [M, V] in the target's dtype."""
        if self._head_factors_D is not None:
            hidden_MD = hidden_MD / self._head_factors_D
        return self._finish_logits(self.model.get_output_embeddings()(hidden_MD))

    def _finish_logits(self, logits_MV: Tensor) -> Tensor:
        if self.head_scale != 1.0:
            logits_MV = logits_MV * self.head_scale
        if self.softcap is not None:
            logits_MV = torch.tanh(logits_MV / self.softcap) * self.softcap
        return logits_MV

    @torch.no_grad()
    def states(self, sequences: Sequence[Tensor], *, tap_layers: Sequence[int]) -> TargetOutput:
        """Whole sequences, packed: taps and last hidden states of their concatenation.

        Nothing is kept afterwards. This is what training reads.
        """
        lengths = [len(ids) for ids in sequences]
        layout, num_pages = _whole_sequences(lengths, page_size=64, device=self.device)
        pages = self.allocate_pages(num_pages=num_pages, page_size=64)
        ids_N = torch.cat([ids.to(self.device) for ids in sequences])
        return self.forward(ids_N, layout=layout, pages=pages, tap_layers=tap_layers)

    @torch.no_grad()
    def fuse(self) -> int:
        """Replace the layers that fit `fusion.FusedLayer`; returns how many did.

        Each is compared with transformers' own layer on a short random text. Needs the plain
        `nn.Linear` layers, so it comes before they are packed.
        """
        calls: dict[nn.Module, tuple[Any, dict[str, Any], Tensor]] = {}

        def record(module: nn.Module, inputs: Any, arguments: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor):
                calls[module] = (inputs, arguments, tensor)

        norm = getattr(self._base, "norm", None)
        watched = [*self._layers, *([norm] if isinstance(norm, nn.Module) else [])]
        hooks = [module.register_forward_hook(record, with_kwargs=True) for module in watched]
        self.states(self._probe_texts(), tap_layers=())
        for hook in hooks:
            hook.remove()
        if norm in calls and len(calls[norm][0]) == 1:
            fuse_norm(norm, calls[norm][0][0], calls[norm][2])
        return sum(
            fuse_layer(layer, window=window, inputs=inputs, arguments=arguments, expected=expected)
            for layer, window in zip(self._layers, self.spec.layer_windows, strict=True)
            if layer in calls
            for inputs, arguments, expected in [calls[layer]]
        )

    def drop_layers(self) -> None:
        """Free the decoder layers: embedding and LM head stay, for a process that gets states."""
        self._layers = nn.ModuleList()
        self.model.base_model.layers = self._layers
        self._attention_modules = []
        self._stack, self._decodes = None, False

    def pack(self, *, quantization: str | None = None, kv_dtype: torch.dtype | None = None) -> None:
        """Swap the linear layers for packed ones; fused layers then run as one operator each.

        Where all of them are fused they run as one operator together. What is quantised gets
        even inputs first (see `smoothing`). From now on keys and values are `kv_dtype`, if given.
        """
        if quantization is not None:
            self._smooth()
        if kv_dtype is not None:
            self.kv_dtype = kv_dtype
        replace_linears(self.model, quantization=quantization)
        for layer in self._fused_layers():
            layer.join()
        head = self.model.get_output_embeddings()
        stack = TargetStack.of(
            self._base,
            list(self._layers),
            head,
            self._embedding,
            head_divisors_D=self._head_factors_D,
        )
        if stack is not None and self._has_bits_of_layers(stack):
            self._stack = stack
            has_plain_head = self.head_scale == 1.0 and self.softcap is None
            self._decodes = has_plain_head and stack.has_embedding and stack.has_head

    def compile(self) -> None:
        """Compile the decoder layers that are not fused, as one region that they all share.

        Two graphs are built at first use: for one token and for any larger number.
        """
        compiled: dict[Any, Any] = {}
        for layer in self._layers:
            if hasattr(layer, "fused"):
                continue
            plain = inspect.unwrap(type(layer).forward)
            if plain not in compiled:
                compiled[plain] = torch.compile(plain, dynamic=True)
            layer.forward = types.MethodType(compiled[plain], layer)

    def _fused_layers(self) -> list[FusedLayer]:
        found = [getattr(layer, "fused", None) for layer in self._layers]
        return [layer for layer in found if isinstance(layer, FusedLayer)]

    @torch.no_grad()
    def _smooth(self) -> None:
        fused = self._fused_layers()
        linears = [smoothing.products(layer) for layer in fused]
        with smoothing.metered([linear for layer in linears for linear in layer]):
            texts = self._likely_texts()
        with smoothing.metered([linear for layer in linears for linear in layer]) as meters:
            hidden_ND = self.states(texts, tap_layers=()).hidden_ND
        for index, layer in enumerate(fused):
            smoothing.smooth(layer, meters[3 * index : 3 * index + 3])
        self._smooth_head(hidden_ND)

    def _smooth_head(self, hidden_ND: Tensor) -> None:
        # Not folded into the final norm: its outputs are taps, too.
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return
        energy_D = smoothing.relative_energy(hidden_ND)
        factors_D = smoothing.input_factors(energy_D, head.weight)
        own = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        own.weight, own.bias = head.weight, head.bias
        smoothing.multiply_columns(own, factors_D)  # the embedding may be the same tensor
        self.model.set_output_embeddings(own)
        self._head_factors_D = factors_D.to(self.dtype)

    def _likely_texts(self) -> list[Tensor]:
        """What the model thinks follows each beginning of a random text: no data is needed, and
        its outliers are nearer to those of real text than the random text's own."""
        generator = torch.Generator().manual_seed(0)
        length = min(32, self.spec.max_positions)
        ids_BT = torch.randint(self.spec.vocab_size, (8, length), generator=generator)
        hidden_ND = self.states(list(ids_BT), tap_layers=()).hidden_ND
        head = PackedLinear.pack(self.head_weight_VD)  # its bits do not depend on the threads
        best_BT = head(hidden_ND).argmax(dim=-1).view_as(ids_BT)
        return list(torch.cat((ids_BT[:, :1], best_BT[:, :-1]), dim=1))

    def _has_bits_of_layers(self, stack: TargetStack) -> bool:
        texts, taps = self._probe_texts(), range(-1, self.spec.num_layers)
        by_layer = self.states(texts, tap_layers=taps)
        self._stack = stack
        together = self.states(texts, tap_layers=taps)
        self._stack = None
        return torch.equal(together.taps_NM, by_layer.taps_NM) and torch.equal(
            together.hidden_ND, by_layer.hidden_ND
        )

    def _probe_texts(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(self.spec.vocab_size, (n,), generator=generator) for n in (19, 5)]

    def _run(self, ids_N: Tensor, at_N: Tensor, **arguments: Any) -> Tensor:
        output = self._base(
            input_ids=ids_N.unsqueeze(0),
            position_ids=at_N.unsqueeze(0),
            use_cache=False,
            **arguments,
        )
        hidden_ND: Tensor = output.last_hidden_state[0]
        return hidden_ND

    def _bind(self, pages: KVPages) -> None:
        if self._bound is pages:
            return
        for module, keys, values in zip(
            self._attention_modules, pages.keys, pages.values, strict=True
        ):
            attention.bind_pages(module, keys, values)
        self._bound = pages

    def _install_taps(self) -> None:
        def keep(index: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                self._tapped[index] = output[0] if isinstance(output, tuple) else output

            return hook

        for index, layer in enumerate(self._layers):
            layer.register_forward_hook(keep(index))

    def _check_head(self, expected_1V: Tensor) -> None:
        # the model's own forward pass is the judge of our reading of its head
        with torch.inference_mode():
            ids_1 = torch.zeros(1, dtype=torch.long, device=self.device)
            hidden = self._run(ids_1, ids_1, probe=AttentionProbe())
            difference = (self.logits(hidden).float() - expected_1V.float()).abs().max()
        if not difference <= 1e-3 * expected_1V.float().abs().max().clamp_min(1.0):
            raise ModelError(
                f"Target {self.spec.name} ({self.spec.model_type}) changes its logits after the "
                "LM head in a way that dspark does not know; this architecture is not supported."
            )


def _whole_sequences(
    lengths: Sequence[int], *, page_size: int, device: torch.device
) -> tuple[AttentionLayout, int]:
    counts = [-(-length // page_size) for length in lengths]
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slots = tables[rows, positions // page_size].long() * page_size + positions % page_size
    layout = AttentionLayout(
        block_tables_RP=tables.to(device),
        query_starts_R1=starts.to(device),
        visible_N=(positions + 1).to(device, torch.int32),
        positions_N=positions.to(device),
        slots_N=slots.to(device),
        max_visible=max(lengths),
    )
    return layout, first
