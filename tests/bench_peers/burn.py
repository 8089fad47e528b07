"""Keeps a processor busy for as long as it is told."""

import json
import sys
import time
from pathlib import Path

seconds = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["seconds"]
while time.process_time() < seconds:
    pass
Path(sys.argv[2]).write_text(json.dumps({"answer": "done"}), encoding="utf-8")
