"""Text that lines of Python's logging may quote."""


class OwnText(str):
    """Text that is ours or of a fixed set, such as a digest: it holds nothing that a client sent, and no secret.

    The server's log shows it in messages, as it shows numbers; what else is put into a message is left out there.
    """

    __slots__ = ()
