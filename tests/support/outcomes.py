"""The outcome of a call, for comparisons of an object with its model."""


def outcome(call, *arguments):
    """The value of a call, or the type of its exception."""
    try:
        return call(*arguments)
    except Exception as error:
        return type(error)
