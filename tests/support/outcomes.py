"""The outcome of a call: for comparisons of an object with its model, and for refusals."""


def outcome(call, *arguments):
    """The value of a call, or the type of its exception."""
    try:
        return call(*arguments)
    except Exception as error:
        return type(error)


def refusal(error, call, *arguments):
    """The text of the error that the call must raise, in programs that run without pytest."""
    try:
        call(*arguments)
    except error as caught:
        return str(caught)
    raise AssertionError(f"{call} was accepted")
