"""Files as one ordered sequence of documents, for who wants their text and no more (the tokenizer's training)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_tools.chunks import read_chunks
from data_tools.documents import MAX_DOCUMENT_BYTES, Broken, CorpusFile, Document, Fields
from data_tools.records import items_of


class Corpus:
    """Iterates over the documents of files. `total_bytes` and `position` (both of the files on disk) measure progress.

    `text_field`: of records, with dots for fields in fields. Whatever cannot be read is yielded as `Broken`; empty
    texts are yielded as documents. Raises DataError for a file that cannot be opened or an error of the disk.
    """

    def __init__(
        self, files: Sequence[CorpusFile], text_field: str = "text", max_document_bytes: int = MAX_DOCUMENT_BYTES
    ):
        self.files = list(files)
        self.total_bytes = sum(file.bytes for file in self.files)
        self.position = 0
        self._fields = Fields(text=text_field)
        self._limit = max_document_bytes

    def __iter__(self) -> Iterator[Document | Broken]:
        for chunk in read_chunks(self.files, self._fields, limit=self._limit):
            for item in items_of(chunk, self._fields, self._limit):
                if not isinstance(item, Broken):
                    yield Document(item.texts[-1], item.file, item.line)
                elif item.kind == "broken":
                    yield item
            self.position = chunk.position
        self.position = self.total_bytes
