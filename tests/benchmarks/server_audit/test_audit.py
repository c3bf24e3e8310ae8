"""The audit passes a lossless toy server and fails each planted fault."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dspark.benchmarks.http_api import HttpApi
from dspark.benchmarks.server_audit.asking import Side
from dspark.benchmarks.server_audit.audit import SAME_SERVER, audit, find_reference
from dspark.benchmarks.server_audit.config import AuditConfig
from dspark.benchmarks.server_audit.outcome import AuditReport
from dspark.benchmarks.server_audit.tables import print_audit, verdict
from dspark.errors import InputError, ServerFault
from tests.toy_server import Fault, ToyServer, served

# top_k of the profile is 8 and the toy has six letters, so tests that need a filter narrow it
CONFIG = AuditConfig(
    samples=300,
    tokens=5,
    sampled_prompts=4,
    greedy_tokens=40,
    concurrency=1,
    top_logprobs=6,
    permutations=799,
)
CHATS = [[{"role": "user", "content": f"prompt {i}"}] for i in range(6)]


def side_of(toy: ToyServer) -> Side:
    return Side(api=toy, model="toy", top_logprobs=CONFIG.top_logprobs)


def audited(toy: ToyServer, config: AuditConfig = CONFIG) -> AuditReport:
    side = side_of(toy)
    reference = find_reference(side)
    return audit(
        side,
        url="toy",
        reference=reference,
        reference_name=SAME_SERVER,
        chats=CHATS,
        config=config,
    )


def failed(report: AuditReport) -> str:
    return "; ".join(test.name for test in report.tests if not test.passed)


@pytest.fixture(autouse=True)
def _narrow_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.benchmarks.server_audit import audit as module
    from dspark.benchmarks.server_audit.config import FILTERED, PENALISED, PLAIN

    narrow = replace(FILTERED, fields={"top_k": 2}, top_k=2)
    monkeypatch.setattr(module, "SAMPLED_PROFILES", (PLAIN, narrow, PENALISED))


@pytest.mark.parametrize("states_raw", [False, True])
def test_a_lossless_server_passes(states_raw: bool) -> None:
    """Log-probabilities before or after the processing: both kinds of servers exist."""
    report = audited(ToyServer(states_raw=states_raw))
    assert report.lossless, failed(report)
    assert report.untested == []
    assert report.num_drafted
    assert report.num_sampled_drafted
    assert len(report.tests) == 3 + 7  # two profiles at T=0, three at T=1 of which two are stated


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (
            Fault.ACCEPTS_ALL,
            [
                "T=0 plain: tokens",
                "T=0 plain: likeliest",
                "T=1 plain: chances",
                "T=1 plain: places",
            ],
        ),
        (Fault.RESAMPLES, ["T=1 plain: distribution", "T=1 plain: chances"]),
        (Fault.NO_FILTER, ["T=1 top-k: distribution", "T=1 top-k: chances"]),
        (Fault.NO_PENALTY, ["T=0 penalties: tokens", "T=1 penalties: distribution"]),
    ],
)
def test_each_planted_fault_fails_where_it_shows(fault: Fault, names: list[str]) -> None:
    report = audited(ToyServer(fault=fault))
    assert not report.lossless
    for name in names:
        assert name in failed(report)
    if fault in (Fault.NO_FILTER, Fault.NO_PENALTY):
        assert "T=1 plain" not in failed(report)


def test_a_server_that_cannot_be_switched_is_held_to_its_own_statements() -> None:
    honest = audited(ToyServer(knows_switch=False))
    assert honest.lossless, failed(honest)
    assert "--reference" in honest.untested[0].reason


@pytest.mark.parametrize("fault", [Fault.ACCEPTS_ALL, Fault.RESAMPLES, Fault.NO_FILTER])
def test_faults_show_in_a_server_that_cannot_be_switched(fault: Fault) -> None:
    assert not audited(ToyServer(knows_switch=False, fault=fault)).lossless


def test_a_server_that_ignores_the_switch_is_not_taken_for_one_that_obeys() -> None:
    assert find_reference(side_of(ToyServer(knows_switch=False))) is None
    found = find_reference(side_of(ToyServer()))
    assert found is not None
    assert found.extra == {"speculation": {"max_draft": 0}}


def test_a_reference_server_takes_the_place_of_the_switch() -> None:
    wrong = ToyServer(knows_switch=False, fault=Fault.NO_PENALTY)
    report = audit(
        side_of(wrong),
        url="toy",
        reference=replace(side_of(ToyServer()), extra={"speculation": {"max_draft": 0}}),
        reference_name="other",
        chats=CHATS,
        config=replace(CONFIG, temperature=0.0),
    )
    assert failed(report) == "T=0 penalties: tokens of plain decoding"
    assert report.reference == "other"


def test_near_ties_are_explained_by_the_noise_that_is_measured() -> None:
    """A shift of logits by 0.02 flips some tokens; none of them counts as a loss."""
    report = audited(ToyServer(noise=0.02), replace(CONFIG, temperature=0.0, greedy_tokens=200))
    assert report.lossless, failed(report)
    assert len(report.divergences) > 0
    for found in report.divergences:
        assert found.explained
        assert found.top2_gap is not None
        assert 0.0 <= found.top2_gap <= found.noise <= CONFIG.max_noise


def test_a_fault_does_not_excuse_itself_by_its_own_noise() -> None:
    report = audited(ToyServer(noise=1.5), replace(CONFIG, temperature=0.0))
    assert not report.lossless
    assert max(found.noise for found in report.divergences) <= CONFIG.max_noise


def test_the_verdict_and_the_json_agree() -> None:
    report = audited(ToyServer(fault=Fault.NO_PENALTY), replace(CONFIG, temperature=0.0))
    text = io.StringIO()
    print_audit(Console(file=text, width=200), report)
    assert "NOT lossless" in text.getvalue()
    assert "FAILED" in text.getvalue()
    values = report.to_json()
    assert values["lossless"] is False
    assert values["temperature"] == 0.0
    assert {"name", "statistic", "p_value", "passed"} <= set(values["tests"][0])
    assert {"prompt", "position", "top2_gap", "noise", "explained"} <= set(values["divergences"][0])
    assert "no loss" in verdict(audited(ToyServer(), replace(CONFIG, temperature=0.0)))


def test_a_server_that_drafts_nothing_proves_nothing() -> None:
    """UC-015: every test passes, and the verdict is that there was nothing to test."""
    report = audited(ToyServer(widest=0), replace(CONFIG, temperature=0.0, greedy_tokens=8))
    assert failed(report) == ""
    assert report.num_drafted == 0
    assert not report.lossless
    assert "INCONCLUSIVE" in verdict(report)


def test_other_temperatures_leave_out_what_servers_state_differently() -> None:
    report = audited(ToyServer(), replace(CONFIG, temperature=0.7, samples=60))
    assert report.lossless
    assert [item.name for item in report.untested] == ["chances as stated"]
    assert not any("stated" in test.name for test in report.tests if "T=0.7" in test.name)


def test_it_works_over_http() -> None:
    with served(ToyServer()) as url:
        api = HttpApi(url=url, timeout_s=10)
        assert api.get("/models")["data"][0]["id"] == "toy"
        side = Side(api=api, model="toy", top_logprobs=6)
        report = audit(
            side,
            url=url,
            reference=find_reference(side),
            reference_name=SAME_SERVER,
            chats=CHATS[:2],
            config=replace(CONFIG, samples=20, greedy_tokens=10, concurrency=4),
        )
    assert report.lossless, failed(report)


class Silent:
    """A server without log-probabilities."""

    def post(self, path: str, body: object) -> dict[str, object]:
        return {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}


def test_what_cannot_be_audited_says_so() -> None:
    with pytest.raises(ServerFault, match="no log-probabilities"):
        audited(Silent())  # type: ignore[arg-type]
    with pytest.raises(ServerFault, match="connection refused"):
        HttpApi(url="http://127.0.0.1:9/v1").get("/models")
    with pytest.raises(InputError, match="must be a base"):
        HttpApi(url="localhost:8000")
    with pytest.raises(InputError, match="samples is 3"):
        AuditConfig(samples=3)
    with pytest.raises(InputError, match="take at least 700"):
        AuditConfig(permutations=100)


def test_sampled_answers_without_drafts_are_said_to_prove_little() -> None:
    """As of a policy that adapts, in a crowd of short answers."""
    report = audited(ToyServer(), replace(CONFIG, samples=60))
    console = Console(file=io.StringIO(), width=200)
    print_audit(console, replace(report, num_sampled_drafted=0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tokens for the greedy answers" in text
    assert "NOTHING for the sampled answers" in text
