"""A stack of layers against the same layers run one operator at a time, bit for bit."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.core import AttentionLayout, SamplingParams
from dspark.kernels.decision import decide
from dspark.kernels.elementwise import rms_norm
from dspark.kernels.linear import PackedLinear
from dspark.kernels.rounds import DrawKind, RoundTable
from dspark.kernels.stack import FusedStack, Norm, StackLayer, StackVerdict
from tests.kernels.toy_steps import Case, Step, cases, plain_case


def _numbers(pages: Tensor, value: float) -> Tensor:
    """A copy without NaN; in int8 these are scales whose bytes are all -1."""
    if pages.dtype == torch.int8:
        words = pages.clone().view(torch.int32)
        return torch.where(words == -1, 0, words).view(torch.int8)
    return pages.nan_to_num(nan=value)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shapes of the layers; the heads are those of the step's case."""

    width: int
    num_gates: int
    windows: tuple[int | None, ...]  # of each layer
    rotary_dim: int
    has_head_norms: bool
    has_biases: bool
    has_final_norm: bool
    is_split: bool  # q from one product, k and v from another
    vocab_size: int
    table_dtype: torch.dtype
    quantization: str | None
    taps: tuple[int, ...]


models = st.builds(
    Model,
    width=st.sampled_from([16, 33, 64, 112]),
    num_gates=st.sampled_from([16, 40, 64, 304, 352]),
    windows=st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=3).map(tuple),
    rotary_dim=st.sampled_from([4, 8]),
    has_head_norms=st.booleans(),
    has_biases=st.booleans(),
    has_final_norm=st.booleans(),
    is_split=st.booleans(),
    vocab_size=st.sampled_from([1, 33, 96]),
    table_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    quantization=st.sampled_from([None, "int8"]),
    taps=st.lists(st.integers(-1, 0), max_size=2).map(tuple),
)


class Toy:
    """Random layers of a model, over a step's layout and pages."""

    def __init__(self, model: Model, case: Case) -> None:
        self.model, self.case, self.step = model, case, Step(case)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.num_heads = case.num_kv_heads * case.num_sharing
        self.x_ND = self.random(len(self.step.positions_N), model.width)
        angles = self.random(2048, model.rotary_dim).float()
        self.cos_PE, self.sin_PE = (f(angles).to(model.table_dtype) for f in (torch.cos, torch.sin))
        self.layers = [self.layer(window) for window in model.windows]
        self.final_norm = self.norm(model.width) if model.has_final_norm else None
        # values that were never written are NaN in the step; a layer needs numbers it can compare
        self.pages = [
            (_numbers(self.step.k_pages, 0.5), _numbers(self.step.v_pages, -0.5))
            for _ in model.windows
        ]
        self.head = self.product(model.vocab_size, model.width)
        self.divisors_D = None
        if model.quantization is not None:
            self.divisors_D = self.random(model.width).abs() + 0.25
        self.stack = FusedStack(
            self.layers,
            final_norm=self.final_norm,
            head=self.head,
            head_divisors_D=self.divisors_D,
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.case.dtype)

    def norm(self, size: int) -> Norm:
        return Norm(1 + 0.1 * self.random(size), 1e-5)

    def product(self, num_outputs: int, num_inputs: int) -> PackedLinear:
        weight = self.random(num_outputs, num_inputs) * num_inputs**-0.5
        bias = self.random(num_outputs) if self.model.has_biases else None
        return PackedLinear.pack(weight, bias, quantization=self.model.quantization)

    def layer(self, window: int | None) -> StackLayer:
        case, model = self.case, self.model
        num_q = self.num_heads * case.head_dim
        num_kv = 2 * case.num_kv_heads * case.head_dim
        sizes = [num_q, num_kv] if model.is_split else [num_q + num_kv]
        norms = (self.norm(case.head_dim), self.norm(case.head_dim))
        return StackLayer(
            norm_in=self.norm(model.width),
            norm_mid=self.norm(model.width),
            head_norms=norms if model.has_head_norms else None,
            heads=[self.product(size, model.width) for size in sizes],
            out=self.product(model.width, num_q),
            gate_up=self.product(2 * model.num_gates, model.width),
            down=self.product(model.width, model.num_gates),
            head_dim=case.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=case.num_kv_heads,
            scale=case.head_dim**-0.5,
            window=window,
        )

    def layout(self, rows: slice = slice(None)) -> AttentionLayout:
        """Of the whole step, or of some of its tokens, each as a request of its own."""
        step = self.step
        tables, starts = step.block_tables_RP, step.query_starts_R1
        if rows != slice(None):
            tables = tables[step.request_N[rows]]
            starts = torch.arange(len(tables) + 1, dtype=torch.int32)
        return AttentionLayout(
            block_tables_RP=tables,
            query_starts_R1=starts,
            visible_N=step.visible_N[rows],
            positions_N=step.positions_N[rows],
            slots_N=step.slots_N[rows],
            max_visible=step.max_visible,
        )

    def run(
        self, pages: Sequence[tuple[Tensor, Tensor]], rows: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Hidden states, taps, logits."""
        out = self.stack.run(
            self.x_ND[rows],
            cos_PE=self.cos_PE,
            sin_PE=self.sin_PE,
            pages=self.stack.bind([k for k, _ in pages], [v for _, v in pages]),
            layout=self.layout(rows),
            taps=self.model.taps,
            has_logits=True,
        )
        assert out.logits_NV is not None
        return out.hidden_ND, out.taps_NM, out.logits_NV

    def run_by_operators(self, pages: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        """The same with `rms_norm`, `linear`, `rotary`, `attention` and `silu_mul`, as written."""
        ops, layout, x = torch.ops.dspark, self.layout(), self.x_ND
        case, outputs = self.case, {-1: x}
        for index, (layer, (k_pages, v_pages)) in enumerate(zip(self.layers, pages, strict=True)):
            normed = rms_norm(x, *layer.norm_in)
            heads = torch.cat([product(normed) for product in layer.heads], dim=-1)
            heads = heads.view(len(x), self.num_heads + 2 * case.num_kv_heads, case.head_dim)
            sizes = [self.num_heads, case.num_kv_heads, case.num_kv_heads]
            q, k, v = torch.split(heads, sizes, dim=1)
            if layer.head_norms is not None:
                q, k = (rms_norm(y, *n) for y, n in zip((q, k), layer.head_norms, strict=True))
            positions = layout.positions_N
            ops.rotary(q, k, self.cos_PE[positions], self.sin_PE[positions])
            seen = ops.attention(
                *(q, k, v, k_pages, v_pages, layout.block_tables_RP, layout.query_starts_R1),
                *(layout.visible_N, positions, layout.slots_N, 0),
                *(layer.scale, layer.window, None, None),
            )
            x = x + layer.out(seen.flatten(1))
            gate_up = layer.gate_up(rms_norm(x, *layer.norm_mid))
            x = outputs[index] = x + layer.down(ops.silu_mul(gate_up))
        taps = [outputs[tap] for tap in self.model.taps]
        out = x if self.final_norm is None else rms_norm(x, *self.final_norm)
        head_in = out if self.divisors_D is None else out / self.divisors_D
        return out, torch.cat(taps, dim=-1) if taps else x[:, :0], self.head(head_in)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        return [(k.clone(), v.clone()) for k, v in self.pages]


def plain_model(**changes: object) -> Model:
    values: dict[str, object] = {
        "width": 64,
        "num_gates": 304,
        "windows": (None, 9),
        "rotary_dim": 8,
        "has_head_norms": True,
        "has_biases": False,
        "has_final_norm": True,
        "is_split": False,
        "vocab_size": 80,
        "table_dtype": torch.float32,
        "quantization": None,
        "taps": (-1, 1),
    }
    return Model(**(values | changes))  # type: ignore[arg-type]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@given(model=models, case=cases)
def test_a_stack_is_its_layers_one_by_one(instructions: str, model: Model, case: Case) -> None:
    toy = Toy(model, case)
    pages, expected_pages = toy.copies(), toy.copies()
    expected = toy.run_by_operators(expected_pages)
    assert_same(toy.run(pages), expected)
    for found, wanted in zip(pages, expected_pages, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_a_step_of_any_size(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Steps of few tokens normalise in every thread, others share the work."""
    toy = Toy(
        plain_model(quantization=quantization, width=112),
        plain_case(dtype=dtype, requests=[(150, 1), (3, 1), (40, 1), (0, 1), (290, 1)]),
    )
    pages = toy.copies()
    whole = toy.run(pages)
    for rows in (slice(0, 1), slice(1, 3), slice(1, 5), slice(4, 5)):
        assert_same(toy.run(toy.copies(), rows), [each[rows] for each in whole])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("num_tokens", [1, 5, 9, 40])
def test_threads_go_on_with_whole_heads_and_gates(
    instructions: str, num_tokens: int, head_dim: int, quantization: str | None
) -> None:
    """Heads and gates of whole panels: no thread waits before it rotates, places and activates."""
    case = plain_case(requests=[(140, num_tokens)], dtype=torch.bfloat16)
    toy = Toy(
        plain_model(quantization=quantization, num_gates=96, width=160),
        replace(case, num_kv_heads=3, num_sharing=3, head_dim=head_dim),
    )
    num_threads = torch.get_num_threads()
    expected_pages = toy.copies()
    expected = toy.run_by_operators(expected_pages)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        pages = toy.copies()
        assert_same(toy.run(pages), expected)
        for found, wanted in zip(pages, expected_pages, strict=True):
            assert_same(found, wanted)
    torch.set_num_threads(num_threads)


def test_logits_are_made_only_where_they_are_wanted(instructions: str) -> None:
    toy = Toy(plain_model(), plain_case())
    arguments = {"cos_PE": toy.cos_PE, "sin_PE": toy.sin_PE, "layout": toy.layout()}
    pages = toy.stack.bind(*zip(*toy.copies(), strict=True))
    out = toy.stack.run(toy.x_ND, pages=pages, **arguments)  # type: ignore[arg-type]
    assert out.logits_NV is None
    assert torch.equal(out.hidden_ND, toy.run(toy.copies())[0])
    with pytest.raises(RuntimeError, match="inputs of an int8 head"):
        FusedStack(toy.layers, final_norm=None, head=toy.head, head_divisors_D=toy.x_ND[0])
    toy.stack = FusedStack(toy.layers, final_norm=toy.final_norm)
    with pytest.raises(RuntimeError, match="without a head"):
        toy.run(toy.copies())


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_bits_do_not_depend_on_the_number_of_threads(instructions: str, num_tokens: int) -> None:
    """More threads than cores and than pieces of work among them."""
    toy = Toy(plain_model(), plain_case(requests=[(300, num_tokens)]))
    num_threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(toy.run(toy.copies()))
    torch.set_num_threads(num_threads)
    for other in results[1:]:
        assert_same(other, results[0])


def test_a_step_too_large_for_the_partial_sums_has_the_same_bits(instructions: str) -> None:
    model, case = plain_model(windows=(None,), taps=()), plain_case(requests=[(300, 2300)])
    toy = Toy(model, replace(case, num_kv_heads=1, num_sharing=2, head_dim=16))
    toy.cos_PE = toy.cos_PE.repeat(6, 1)
    toy.sin_PE = toy.sin_PE.repeat(6, 1)
    assert_same(toy.run(toy.copies()), toy.run_by_operators(toy.copies()))


def test_it_runs_in_any_python_thread_and_several_take_turns(instructions: str) -> None:
    toy = Toy(plain_model(), plain_case())
    expected = toy.run(toy.copies())
    results: list[tuple[Tensor, ...]] = []

    def work() -> None:
        results.extend(toy.run(toy.copies()) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert len(results) == 15
    for result in results:
        assert_same(result, expected)


def test_it_runs_in_inference_mode_and_afterwards(instructions: str) -> None:
    toy = Toy(plain_model(), plain_case())
    with torch.inference_mode():
        inside = toy.run(toy.copies())
    assert_same(toy.run(toy.copies()), inside)


def test_a_step_without_tokens_is_empty(instructions: str) -> None:
    toy = Toy(plain_model(), plain_case(requests=[(5, 0)]))
    hidden, taps, logits = toy.run(toy.copies())
    assert (hidden.shape, taps.shape, logits.shape) == ((0, 64), (0, 128), (0, 80))


@pytest.mark.parametrize("name", ["slots_N", "block_tables_RP", "query_starts_R1", "positions_N"])
def test_a_layout_that_leaves_pages_or_tables_is_refused(instructions: str, name: str) -> None:
    toy = Toy(plain_model(), plain_case())
    getattr(toy.step, name)[-1:] = 2**20
    with pytest.raises(RuntimeError):
        toy.run(toy.copies())


def test_what_does_not_fit_is_refused(instructions: str) -> None:
    toy = Toy(plain_model(), plain_case())
    with pytest.raises(RuntimeError, match="layers takes as many keys and values"):
        toy.run(toy.copies()[:1])
    with pytest.raises(RuntimeError, match=r"pages of .* do not hold 3 heads of 64 values"):
        toy.run([toy.copies()[0], tuple(p.float() for p in toy.copies()[1])])  # type: ignore[list-item]
    toy.x_ND = toy.x_ND[:, 1:]
    with pytest.raises(RuntimeError, match="expected rows of 64 values"):
        toy.run(toy.copies())
    layer = replace(toy.layers[0], num_kv_heads=1)
    with pytest.raises(RuntimeError, match="do not fit each other"):
        FusedStack([layer], final_norm=None)


def test_ids_stand_for_their_rows_of_the_embedding(instructions: str) -> None:
    toy = Toy(plain_model(), plain_case())
    embedding_VD = toy.random(50, 64)
    ids_N = torch.randint(50, (len(toy.x_ND),), generator=toy.generator)
    toy.x_ND = embedding_VD[ids_N]
    expected = toy.run(toy.copies())
    toy.x_ND = ids_N
    with pytest.raises(RuntimeError, match="without an embedding"):
        toy.run(toy.copies())
    toy.stack = FusedStack(
        toy.layers, final_norm=toy.final_norm, head=toy.head, embedding_VD=embedding_VD
    )
    assert_same(toy.run(toy.copies()), expected)
    for wrong in (-1, 50):
        toy.x_ND = ids_N.clone()
        toy.x_ND[-1] = wrong
        with pytest.raises(RuntimeError, match=f"id {wrong} is not in an embedding of 50"):
            toy.run(toy.copies())
    with pytest.raises(RuntimeError, match="rows of 64 values"):
        FusedStack(toy.layers, final_norm=None, embedding_VD=embedding_VD[:, 1:])


KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=4),
)


class Decoding:
    """A step from ids to the verdict, and the same by layout, pass and `decide`."""

    def __init__(self, toy: Toy, kinds: Sequence[SamplingParams]) -> None:
        self.toy, self.case = toy, toy.case
        requests = self.case.requests
        embedding_VD = toy.random(toy.model.vocab_size, toy.model.width)
        self.ids = torch.randint(len(embedding_VD), (len(toy.x_ND),), generator=toy.generator)
        toy.x_ND = embedding_VD[self.ids]
        toy.stack = FusedStack(
            toy.layers,
            final_norm=toy.final_norm,
            head=toy.head,
            head_divisors_D=toy.divisors_D,
            embedding_VD=embedding_VD,
        )
        self.lengths = [count - 1 for _, count in requests]
        self.starts = toy.step.query_starts_R1[:-1].tolist()
        self.rounds = RoundTable(
            [
                [DrawKind.of(p) for p in kinds],
                [5 + r for r in range(len(kinds))],
                [context + 1 for context, _ in requests],
                [r % 2 for r in range(len(kinds))],
                self.ids[self.starts].tolist(),
                [p.top_k or 0 for p in kinds],
            ],
            [[p.temperature for p in kinds], [p.top_p for p in kinds], [p.min_p for p in kinds]],
            device=torch.device("cpu"),
        )
        num_slots = max(self.lengths)
        shape = (len(kinds), num_slots, toy.model.vocab_size)
        self.probs_RKS = toy.random(*shape).float().softmax(dim=-1)
        self.tokens_RK = torch.zeros(shape[:2], dtype=torch.int64)
        for r, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            self.tokens_RK[r, :length] = self.ids[start + 1 : start + 1 + length]

    def at_once(
        self,
        pages: Sequence[tuple[Tensor, Tensor]],
        *,
        has_states: bool,
        forbidden: Sequence[int] = (),
    ) -> StackVerdict:
        toy = self.toy
        table = toy.step.block_tables_RP.clamp(0, len(pages[0][0]) - 1)
        return toy.stack.decode(
            self.ids.tolist(),
            [(r, context, count) for r, (context, count) in enumerate(self.case.requests)],
            rounds=self.rounds,
            cos_PE=toy.cos_PE,
            sin_PE=toy.sin_PE,
            pages=toy.stack.bind(*zip(*pages, strict=True)),
            table=table,
            taps=toy.model.taps,
            draft_tokens_RK=self.tokens_RK,
            draft_probs_RKS=self.probs_RKS,
            has_states=has_states,
            forbidden=forbidden,
        )

    def by_operators(self, logits_NV: Tensor) -> tuple[list[int], list[int]] | None:
        return decide(
            logits_NV,
            rounds=self.rounds,
            starts=self.starts,
            lengths=self.lengths,
            draft_tokens_RK=self.tokens_RK,
            draft_probs_RKS=self.probs_RKS,
        )


@given(
    model=models,
    case=cases,
    counts=st.lists(st.integers(1, 6), min_size=5, max_size=5),
    kinds=st.lists(st.sampled_from(KINDS), min_size=5, max_size=5),
    has_states=st.booleans(),
    num_forbidden=st.sampled_from([0, 1, 60]),
)
def test_a_decoding_step_is_its_layout_its_pass_and_its_verdict(
    instructions: str,
    model: Model,
    case: Case,
    counts: list[int],
    kinds: list[SamplingParams],
    has_states: bool,
    num_forbidden: int,
) -> None:
    """Ids that are forbidden in a row are never drawn there, the best ones among them."""
    requests = [(c, n) for (c, _), n in zip(case.requests, counts, strict=False)]
    case = replace(case, requests=requests, is_two_way=False)
    decoding = Decoding(Toy(model, case), kinds[: len(requests)])
    toy = decoding.toy
    pages, expected_pages = toy.copies(), toy.copies()
    hidden_ND, taps_NM, logits_NV = toy.run(expected_pages)
    cells = [
        (row, token)
        for row, best in enumerate(logits_NV.float().argmax(dim=-1).tolist())
        for token in {best, *range(0, len(logits_NV[0]) - 1, 2)}
    ][: num_forbidden if len(logits_NV[0]) > 3 else 0]
    for row, token in cells:
        logits_NV[row, token] = -torch.inf
    verdict = decoding.at_once(
        pages, has_states=has_states, forbidden=[number for cell in cells for number in cell]
    )
    assert (verdict.num_accepted, verdict.next_tokens) == decoding.by_operators(logits_NV)
    assert verdict.logits_NV is None
    for found, wanted in zip(pages, expected_pages, strict=True):
        assert_same(found, wanted)
    assert (verdict.states is not None) == has_states
    if verdict.states is not None:
        ids_N, states_ND, states_NM, layout = verdict.states
        assert_same([states_ND, states_NM, ids_N], [hidden_ND, taps_NM, decoding.ids])
        step = toy.step
        assert_same(
            [layout.visible_N, layout.positions_N, layout.slots_N],
            [step.visible_N, step.positions_N, step.slots_N],
        )
        assert layout.max_visible == step.max_visible


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_verdict_does_not_depend_on_the_number_of_threads(
    instructions: str, quantization: str | None
) -> None:
    """Each thread looks for the best of its own columns; of equal logits the lowest wins."""
    toy = Toy(
        plain_model(vocab_size=640, quantization=quantization),
        plain_case(requests=[(30, 1), (4, 3), (9, 1), (77, 2)]),
    )
    weight_VD = toy.random(320, 64)
    toy.head = PackedLinear.pack(weight_VD.repeat(2, 1), quantization=quantization)
    decoding = Decoding(toy, [KINDS[0]] * 4)
    num_threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        found.append(decoding.at_once(toy.copies(), has_states=False)[:2])
    torch.set_num_threads(num_threads)
    assert found == [found[0]] * 4
    assert max(found[0][1]) < 320
    assert found[0] == decoding.by_operators(toy.run(toy.copies())[2])


def test_a_row_that_is_not_finite_comes_back_with_its_logits(instructions: str) -> None:
    decoding = Decoding(Toy(plain_model(), plain_case(requests=[(3, 1), (40, 2)])), [KINDS[0]] * 2)
    pages = decoding.toy.copies()
    for keys, _ in pages:
        keys.fill_(torch.nan)
    verdict = decoding.at_once(pages, has_states=True)
    assert verdict.next_tokens == [-1, -1]
    assert verdict.logits_NV is not None
    assert verdict.logits_NV.isnan().all()
    assert verdict.states is not None


def test_runs_and_counters_must_fit_each_other(instructions: str) -> None:
    decoding = Decoding(Toy(plain_model(), plain_case(requests=[(3, 1), (40, 2)])), [KINDS[0]] * 2)
    decoding.rounds.options = [[0.0], [1.0], [0.0]]
    with pytest.raises(RuntimeError, match="for each of 1 requests"):
        decoding.at_once(decoding.toy.copies(), has_states=False)


def test_pages_belong_to_the_stack_that_bound_them(instructions: str) -> None:
    toy, other = Toy(plain_model(), plain_case()), Toy(plain_model(), plain_case())
    keys, values = zip(*toy.copies(), strict=True)
    pages = toy.stack.bind(keys, values)
    with pytest.raises(RuntimeError, match="of another stack"):
        other.stack.run(
            other.x_ND, cos_PE=toy.cos_PE, sin_PE=toy.sin_PE, pages=pages, layout=toy.layout()
        )


def test_a_head_without_a_norm_reads_no_value_of_the_next_row(instructions: str) -> None:
    """Rows of an odd number of bfloat16 values end inside of what a product reads at a time."""
    model = plain_model(width=33, has_final_norm=False, taps=())
    toy = Toy(model, plain_case(requests=[(3, 1), (40, 1), (5, 1)], dtype=torch.bfloat16))
    toy.x_ND[1] = torch.nan
    logits_NV = toy.run(toy.copies())[2]
    assert logits_NV[[0, 2]].isfinite().all()
    assert logits_NV[1].isnan().all()
