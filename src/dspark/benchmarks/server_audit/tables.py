"""An audit as a person reads it: the verdict, the tests, what differs, what was not tested."""

from rich.console import Console
from rich.table import Table

from dspark.benchmarks.server_audit.outcome import AuditReport, Divergence

_MOST_SHOWN = 10


def print_audit(console: Console, report: AuditReport) -> None:
    """The verdict first."""
    console.print(verdict(report), style="bold green" if report.lossless else "bold red")
    compared = report.reference or "nothing: only its own statements"
    console.print(f"compared with {compared}; {_drafts(report)}", style="dim", highlight=False)
    table = Table(pad_edge=False)
    for title in ("test", "statistic", "p", "", "what was compared"):
        table.add_column(title, justify="right" if title in ("statistic", "p") else "left")
    for test in report.tests:
        table.add_row(
            test.name,
            f"{test.statistic:.4g}",
            "-" if test.p_value is None else f"{test.p_value:.2g}",
            "passed" if test.passed else "[bold red]FAILED[/]",
            test.detail,
        )
    console.print(table)
    for divergence in report.divergences[:_MOST_SHOWN]:
        console.print(_sentence(divergence), highlight=False, markup=False)
    if len(report.divergences) > _MOST_SHOWN:
        console.print(f"... and {len(report.divergences) - _MOST_SHOWN} more differences")
    for item in report.untested:
        console.print(
            f"not tested: {item.name}, because {item.reason}", highlight=False, markup=False
        )


def verdict(report: AuditReport) -> str:
    """One sentence."""
    if report.lossless:
        return (
            f"{report.url}: no loss found in {len(report.tests)} tests. A lossless server fails "
            f"the statistical ones, all together, in at most {report.false_alarm:.2%} of audits."
        )
    failed = [test.name for test in report.tests if not test.passed]
    if not failed and not report.has_drafts:
        return (
            f"{report.url}: INCONCLUSIVE, for it drafted nothing in the greedy answers; ask for "
            "drafts, with a policy of fixed for example."
        )
    if not failed:
        return f"{report.url}: nothing could be tested."
    return f"{report.url}: NOT lossless. Failed: {'; '.join(failed)}."


def _drafts(report: AuditReport) -> str:
    if report.num_drafted is None and report.num_sampled_drafted is None:
        return "the server does not tell how many tokens it drafted"
    told = {"greedy": report.num_drafted, "sampled": report.num_sampled_drafted}
    return ", ".join(
        f"it drafted {number} tokens for the {kind} answers"
        if number
        else f"it drafted NOTHING for the {kind} answers, so they prove nothing"
        for kind, number in told.items()
        if number is not None
    )


def _sentence(found: Divergence) -> str:
    gap = "no gap stated" if found.top2_gap is None else f"top-2 gap {found.top2_gap:.4f}"
    verdict = "explained by" if found.explained else "NOT explained by"
    before, after = (repr(t) if t is not None else "its end" for t in found.tokens)
    return (
        f"T=0 {found.profile}, prompt {found.prompt}: differs at token {found.position}, {after} "
        f"for {before}; {gap}, {verdict} the noise {found.noise:.4f}"
    )
