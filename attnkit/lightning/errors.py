"""The errors whose messages are meant for the user at the command line."""

import signal
from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
    """A mistake that the user can correct: a wrong key, a missing folder, an unreadable file.

    The text is complete: it names the argument or path, what was given and what was expected, in
    at most three lines. The command line prints it without a traceback and exits with code 2; in a
    script it is a `ValueError`, with the cause chained.

    Args:
        message: what is wrong and what to do; with `expected`, the text after the given value.
        key: key of the configuration, argument or file; it begins the text.
        expected: what would be right; the text then has the given value, too.
        given: the value in its place.
        where: where it was written: an override, or a file and its line. It ends the text.

    All are attributes; `message` includes what was expected and given.
    """

    def __init__(
        self,
        message: str = "",
        *,
        key: str = "",
        expected: str = "",
        given: Any = None,
        where: str = "",
    ) -> None:
        if expected:
            message = f"expected {expected}, got {_shown(given)}{message}"
        text = f"{key}: {message}" if key else message
        super().__init__(f"{text}\n  in {where}" if where else text)
        self.message, self.key, self.where = message, key, where
        self.expected, self.given = expected, given


def _shown(value: Any) -> str:
    kind = "mapping" if isinstance(value, Mapping) else type(value).__name__
    text = "{" + ", ".join(map(str, value)) + "}" if isinstance(value, Mapping) else repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({kind})"


class RunError(Exception):
    """A failure during a run, such as a full disk or a loss that is NaN.

    The message is complete, like that of a `UserError`. The exit code is 1.
    """


def first_line(error: BaseException, *, named: bool = False) -> str:
    """Return the first line of an error's message that is not empty, for use in another message.

    Args:
        named: whether the name of the error's class precedes it. An empty message gives the name.
    """
    name = type(error).__name__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
    return f"{name}: {line}" if named and line else line or name


class StoppedBySignal(BaseException):
    """A signal has stopped the run. It is no `Exception`, so that error handlers do not catch it.

    Args:
        signum: the signal. Ctrl-C ends with exit code 130, others with 143, as for SIGTERM.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def code(self) -> int:
        """The exit code."""
        return 130 if self.signum == signal.SIGINT else 143
