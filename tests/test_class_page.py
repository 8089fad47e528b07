"""The page for a class on JupyterHub: its files are valid, and what hands the book out keeps what students wrote."""

import os
import re
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIG, START = re.findall(
    r"```python\n(.*?)```", (ROOT / "chapters" / "class.md").read_text(encoding="utf-8"), re.DOTALL
)


def test_the_configuration_starts_the_script_and_the_culler():
    class Names(dict):
        def __missing__(self, name):
            return self.setdefault(name, type("Section", (), {})())

    names = Names()
    config = type("Config", (), {"__getattr__": lambda self, name: names[name]})()
    exec(CONFIG, {"get_config": lambda: config})
    assert names["Spawner"].cmd == ["/srv/start"]
    assert names["JupyterHub"].load_roles[0]["services"] == [
        service["name"] for service in names["JupyterHub"].services
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="the hub runs on Linux")
def test_start_copies_what_is_missing_and_keeps_what_is_there(tmp_path, monkeypatch):
    book, home, started = tmp_path / "book", tmp_path / "home", []
    for name in ("chapters/figures/a.png", "chapters/a.ipynb", "labs/b.ipynb", "solutions/b.ipynb"):
        (book / name).parent.mkdir(parents=True, exist_ok=True)
        (book / name).write_text("the book's", encoding="utf-8")
    (book / "labs" / "b.ipynb").chmod(0o444)
    (home / "minibatcher" / "labs").mkdir(parents=True)
    (home / "minibatcher" / "chapters").mkdir()
    (home / "minibatcher" / "chapters" / "a.ipynb").write_text("mine", encoding="utf-8")
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append((program, arguments)))
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(sys, "argv", ["start", "--port=1"])
    before = os.umask(0o022)
    try:
        exec(START.replace("/srv/minibatcher", str(book)), {})
    finally:
        os.umask(before)
    own = {path.relative_to(home).as_posix(): path for path in home.rglob("*") if path.is_file()}
    assert {name: path.read_text(encoding="utf-8") for name, path in own.items()} == {
        "minibatcher/chapters/figures/a.png": "the book's",
        "minibatcher/chapters/a.ipynb": "mine",
        "minibatcher/labs/b.ipynb": "the book's",
    }
    assert stat.S_IMODE(own["minibatcher/labs/b.ipynb"].stat().st_mode) == 0o600
    assert started == [("/srv/venv/bin/jupyterhub-singleuser", ["/srv/venv/bin/jupyterhub-singleuser", "--port=1"])]
