"""`minibatcher serve`: mistakes get a sentence before anything is loaded; and one whole life, to SIGTERM."""

import http.client
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from minibatcher.cli import main
from minibatcher.cli.options import file_stems
from minibatcher.cli.serve_engines import save_timeline, timeline_files
from minibatcher.errors import InvalidParameter
from minibatcher.serve.listening import listen_on
from minibatcher.timeline import Timeline


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch):
    """Mistakes are told at once, not after minutes of loading."""

    def load(*args, **options):
        pytest.fail("a model is being loaded")

    monkeypatch.delenv("MINIBATCHER_API_KEY", raising=False)
    monkeypatch.setattr("minibatcher.cli.serve_engines.load_for", load)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--port", "65536"], "65536 is more than 65,535"),
        (["--port", "-1"], "not a whole number"),
        (["--host", "192.0.2.1"], "192.0.2.1 is no address of this machine"),
        (["--host", "no such host"], "unknown host"),
        (["--strategy", "fastest"], "unknown strategy 'fastest'"),
        (["--ordering", "priority,fcfs"], "must name one of"),
        (["--enable-prefix-caching", "off,on"], "must name one of off, on"),
        (["--strategy", "static", "--enable-prefix-caching", "on"], "the strategy static has no KV blocks to share"),
        (["--max-waiting-requests", "0"], "not a whole number of at least 1"),
        (["--model", "bard", "--model", "bard"], "two models are called 'bard'; give each a --served-model-name"),
        (["--served-model-name", "a", "--served-model-name", "b"], "1 --model need as many --served-model-name, not 2"),
        (["--served-model-name", ""], "a model needs a name"),
        (["--api-keys", "no-such.toml"], "can't read the key file 'no-such.toml'"),
        (["--api-key", "not one word"], "without spaces"),
        (["--api-key", ""], "and not empty"),
        (["--api-key", "x", "--api-keys", "y"], "not allowed with"),
        (["--timeline", "no-such-folder/x.json"], "can't write 'no-such-folder/x.json'"),
    ],
)
def test_a_mistake_gets_a_sentence_and_exit_code_2(options, sentence, capsys):
    try:
        code = main(["serve", "--port", "0", *options])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert err.startswith("minibatcher serve: ") and sentence in err
    assert err.count("\n") == 1 and "not one word" not in err


def test_a_port_in_use_gets_a_sentence(capsys):
    with listen_on("127.0.0.1", 0) as other:
        other.listen()
        assert main(["serve", "--port", str(other.getsockname()[1])]) == 2
    assert "is in use; take another with --port" in capsys.readouterr().err


def test_without_its_packages_the_help_is_there_and_serving_says_what_to_install():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'prometheus_client', 'pydantic', 'uvicorn']))"
    code = f"{blocked}; from minibatcher.cli import main; sys.exit(main(sys.argv[1:]))"

    def run(*args):
        return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, encoding="utf-8", timeout=60)

    assert "openai.OpenAI(base_url=" in run("serve", "--help").stdout
    done = run("serve")
    assert done.returncode == 2 and "pip install 'minibatcher[serve]'" in done.stderr and not done.stdout


def ask(port, path, body=None, key=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
    return connection.getresponse()


def test_two_models_behind_keys_from_the_first_line_to_the_last(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.alice]\nkey = "secret-a"\n[keys.bob]\nkey = "secret-b"\n', encoding="utf-8")
    names = [f"--served-model-name={name}" for name in ("org/one", "two")]
    options = ["--port=0", f"--api-keys={keys}", f"--timeline={tmp_path / 'run.json'}", "--shutdown-timeout-s=0.2"]
    options += ["--model=bard", "--model=bard", *names, "--max-model-len=1024", "--max-num-seqs=2"]
    child = subprocess.Popen(
        [sys.executable, "-m", "minibatcher", "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        first = child.stdout.readline()
        assert first.startswith("minibatcher serves org/one, two at http://127.0.0.1:"), child.communicate()[1]
        port = int(first.split("/v1")[0].rpartition(":")[2])
        body = {"model": "org/one", "prompt": "ROMEO:", "max_tokens": 5, "ignore_eos": True}
        assert ask(port, "/v1/completions", body).status == 401
        done = json.loads(ask(port, "/v1/completions", body, "secret-a").read())
        assert done["usage"]["completion_tokens"] == 5 and done["model"] == "org/one"
        text = ask(port, "/metrics").read().decode()
        assert 'vllm:generation_tokens_total{model_name="org/one"} 5.0' in text
        assert 'vllm:generation_tokens_total{model_name="two"} 0.0' in text
        assert 'minibatcher:tenant_generation_tokens_total{model_name="org/one",tenant="alice"} 5.0' in text
        long = {"model": "two", "prompt": [5], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        stream = ask(port, "/v1/completions", long, "secret-b")
        assert stream.readline().startswith(b"data: {")
        child.send_signal(signal.SIGTERM)
        events = [line for line in stream.read().split(b"\n") if line]
        assert b'"finish_reason":"abort"' in events[-2] and events[-1] == b"data: [DONE]"
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 0 and not out
    assert "Traceback" not in err and "secret" not in err and "ordering fair-share" in err
    one, two = (Timeline.load(tmp_path / f"run-{name}.json") for name in ("org-one", "two"))
    assert [(r.num_output_tokens, r.finish_reason, r.tenant) for r in one.requests.values()] == [(5, "length", "alice")]
    assert [(r.finish_reason, r.tenant) for r in two.requests.values()] == [("abort", "bob")] and two.steps


@pytest.mark.parametrize("host, warned", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_address_without_keys_is_warned_of(host, warned, capsys, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("minibatcher.cli.serve_engines.load_for", stop)
    for key in ([], ["--api-key", "some-secret"]):
        assert main(["serve", "--port", "0", "--host", host, *key]) == 130
        err = capsys.readouterr().err
        assert ("anybody who reaches 0.0.0.0 may use this server" in err) == (warned and not key)
        assert "some-secret" not in err


def test_each_timeline_has_a_file_of_its_own_whatever_its_model_is_called(tmp_path, capsys):
    names = ["org/a", "org-a", "org a", "..", "x" * 500, "x" * 500 + "y", "a\nb:c"]
    files = timeline_files(str(tmp_path / "run.json"), names)
    assert list(files) == names and len(set(files.values())) == len(names)
    for file in files.values():
        Timeline().save(file)
    assert len(list(tmp_path.iterdir())) == len(names)
    assert file_stems(["org/a", "org-a"]) == ["org-a", "org-a-2"]
    assert timeline_files(None, names) == {} and timeline_files("run.json", ["a/b"]) == {"a/b": "run.json"}
    with pytest.raises(InvalidParameter, match="must name a file"):
        timeline_files("/", names)
    holder = SimpleNamespace(timeline=Timeline())
    assert (
        not save_timeline(holder, "a", str(tmp_path / "gone" / "run.json")) and "can't write" in capsys.readouterr().err
    )
    assert save_timeline(holder, "b", str(tmp_path / "b.json")) and (tmp_path / "b.json").exists()
