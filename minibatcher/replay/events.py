"""Server-sent events out of the pieces in which they come over the network."""

from __future__ import annotations


class Events:
    """Puts events together, whatever the pieces: an event cut in two, several in one, lines that end with LF or CRLF.

    Source: the HTML standard, «Server-sent events», on how a stream is to be read.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come yet
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that is complete with this piece."""
        text = self._rest + piece if self._rest else piece
        # A CR may be half of a CRLF; nothing is lost by waiting for the next byte.
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
        self._rest = text[end:]
        complete = []
        for line in text[:end].splitlines():
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b"error:"):  # older llama.cpp servers tell of a failure in this way
                complete.append(b'{"error":' + line[6:] + b"}")
            elif not line and self._data:
                complete.append(b"\n".join(self._data))
                self._data.clear()
        return complete

    def close(self) -> list[bytes]:
        """What was left when the stream ended: servers forget the blank line after their last event."""
        return self.feed(b"\n\n")
