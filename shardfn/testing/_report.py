"""The known state of the ranks of one call, and the error with a report."""

import dataclasses
import pickle

from shardfn.core import RankError

GRACE = 5.0  # seconds that the other ranks have to end once a rank has failed


@dataclasses.dataclass
class Report:
    """Known state of one rank of a call."""

    status: str = "running"  # then finished | failed | died
    time: float = 0.0
    value: bytes | None = None  # the pickled return value, or error
    line: str = ""
    text: str = ""
    released: bool = False
    idle: bool = False
    stack: str = ""
    started: bool = False  # the process group is set up, the function runs

    @property
    def stuck(self) -> bool:
        """Returns whether the rank still has something to do, other than to wait for peers."""
        return self.status == "running" or (self.released and not self.idle)


def raise_first(what: str, timeout: float, reports: list[Report], errors: list[str]) -> None:
    """Raises the error of the call, if any: of the first failed rank, a death, or a hang.

    Args:
        what: name of the function that ran.
        timeout: seconds that the function had.
        reports: report of each rank.
        errors: stderr of each rank.
    """
    bad = [rank for rank, r in enumerate(reports) if r.status in ("failed", "died")]
    stuck = [rank for rank, r in enumerate(reports) if r.stuck]
    if not bad and not stuck:
        return
    if not bad:
        raise TimeoutError(
            f"{what} did not finish on {len(reports)} ranks within {timeout:g} s:\n{_list_states(reports)}"
        )
    # A death is the cause of the errors of peers, whichever arrived first.
    first = min(bad, key=lambda rank: (reports[rank].status != "died", reports[rank].time))
    report = reports[first]
    error = _load_error(f"rank {first} of {len(reports)} {report.line} in {what}", report)
    error.add_note(_make_note(first, reports, errors[first], bad, stuck))
    raise error


def _load_error(text: str, report: Report) -> BaseException:
    try:
        if report.value is not None:
            return pickle.loads(report.value)
    except Exception as lost:
        text = f"{text}\n(the error cannot be unpickled here: {lost!r})"
    return RankError(text)


def _make_note(first: int, reports: list[Report], stderr: str, bad: list[int], stuck: list[int]) -> str:
    report = reports[first]
    parts = [f"On rank {first} of {len(reports)}" + (f":\n{_rank_frames(report)}" if report.text else ", which died.")]
    others = [f"  rank {rank}: {_describe_error(reports[rank], report)}" for rank in bad if rank != first]
    if others:
        parts.append("After that:\n" + "\n".join(others))
    if stuck:
        parts.append(f"Other ranks did not end within {GRACE:g} s:\n{_list_states(reports)}")
    if stderr.strip():
        parts.append(f"stderr of rank {first}:\n{stderr.strip()[-4000:]}")
    return "\n\n".join(parts)


def _rank_frames(report: Report) -> str:
    """Returns the traceback of a rank, without the message of an error raised here."""
    if report.value is None or not report.text.endswith(report.line):
        return report.text
    head, *rest = report.line.splitlines()
    return report.text.removesuffix(report.line) + head + (" ... (in full above)" if rest else "")


def _describe_error(report: Report, first: Report) -> str:
    """Returns the error of a further rank in a line."""
    return "the same" if report.line and report.line == first.line else report.line.splitlines()[0]


def _list_states(reports: list[Report]) -> str:
    return "\n".join(f"  rank {rank}: {_describe_state(r)}" for rank, r in enumerate(reports))


def _describe_state(report: Report) -> str:
    if report.status in ("failed", "died"):
        return f"{report.status}: {report.line.splitlines()[0]}"
    if not report.stuck:
        return "finished"
    doing = "still running" if report.status == "running" else "finished, but does not leave the process group"
    return f"{doing}\n{report.stack}"
