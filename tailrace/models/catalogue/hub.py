"""Downloads files of a Hugging Face repository; run as a child process by `sources`, never imported.

    python -m tailrace.models.catalogue.hub REPOSITORY REVISION FOLDER '[[path, size, sha256], ...]'

Asks for the files' metadata first: a repository that cannot be reached, or that holds other bytes than the catalogue
says, is refused within seconds and before anything is downloaded. Says why in one line, exit status 1.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")


def main(repository: str, revision: str, folder: str, files: str) -> int:
    """Exit status: 0 when every file lies below `folder`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    wanted: list[tuple[str, int, str]] = [(path, size, sha256) for path, size, sha256 in json.loads(files)]
    try:
        for path, size, sha256 in wanted:
            found = get_hf_file_metadata(hf_hub_url(repository, path, revision=revision), timeout=5)
            if found.size != size or (found.etag and len(found.etag) == 64 and found.etag != sha256):
                print(f"{path} there is not the catalogue's: {found.size} bytes, SHA-256 {found.etag}")
                return 1
        for path, _, _ in wanted:
            hf_hub_download(repository, path, revision=revision, local_dir=folder)
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises is one line for the parent to read
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"{type(error).__name__}: {lines[0] if lines else 'no details'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
