"""mypy accepts the code of the README, the documentation and the examples as users write it, on `cuaenv.client`.

Not pyright: its package downloads Node and its own program at the first run, and tests use no network.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from cuaenv import actions, client
from cuaenv.client import errors, results
from trainer import client as trainer_client

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SKIPPED = ("gymnasium", "mcp", "mcp_types", "playwright", "rich", "starlette", "uvicorn")
_IMPORT = re.compile(r"^(from|import) (trainer|cuaenv|envd)\b", re.MULTILINE)


def test_every_public_name_of_the_client_is_listed() -> None:
    listed = set(client.__all__)
    assert listed >= {*actions.__all__, *errors.__all__, *results.__all__}
    assert client.__all__ == sorted(listed)
    assert trainer_client.__all__ is client.__all__
    assert all(getattr(trainer_client, name) is getattr(client, name) for name in listed)


def test_a_type_checker_accepts_the_documented_code(tmp_path: Path) -> None:
    names = [str(path) for path in (ROOT / "docs" / "examples").glob("*.py")]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, code in enumerate(_BLOCK.findall(page.read_text())):
            if _IMPORT.search(code):
                path = tmp_path / f"{page.stem.replace('-', '_')}_{number}.py"
                is_async = re.search(r"^(async with|.*\bawait\b)", code, re.MULTILINE)
                body = f"async def main() -> None:\n{textwrap.indent(code, '    ')}" if is_async else code
                path.write_text(body)
                names.append(str(path))
    assert any("README" in name for name in names)
    # Blocks use names of earlier ones, have placeholders for bodies, and do not narrow results of other packages.
    flags = [f"--disable-error-code={code}" for code in ("name-defined", "return", "union-attr")]
    flags += ["--no-implicit-reexport", "--check-untyped-defs", "--ignore-missing-imports", "--explicit-package-bases"]
    # Without packages whose types no documented code uses: gymnasium's alone took more time than all others.
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\n[{','.join(f'mypy-{name}.*' for name in _SKIPPED)}]\nfollow_imports = skip\n")
    cache = Path(os.environ.get("MYPY_CACHE_DIR", ROOT / ".mypy_cache"), "documented")
    flags += [f"--config-file={config}", f"--cache-dir={cache}"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *names],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": ""},
    )
    assert run.returncode == 0, run.stdout + run.stderr
