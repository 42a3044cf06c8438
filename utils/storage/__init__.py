"""Folders on a local disk or behind an fsspec URL, written whole or not at all.

`places` opens a path or a URL, `local` and `remote` are the two kinds of `folder`, `retry` repeats
failed calls to a store.
"""
