"""Files that are replaced as a whole."""

from pathlib import Path

from trainer.files import write_atomically


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"one")
    write_atomically(tmp_path / "a", b"two")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"two")]
