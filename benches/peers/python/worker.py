"""One peer in a process of its own, told what to do line by line; src/protocol.rs says what is said."""

import importlib
import json
import os
import sys
import time


class Unsupported(Exception):
    """This peer does not do that, or nothing here; the message says why."""


def answer(peer, request):
    (kind, body), = request.items()
    if kind == "prepare":
        return {"prepared": {"how": peer.prepare(body)}}
    if kind == "burst":
        run, clock, seconds = peer.run, time.perf_counter, []
        for _ in range(body["runs"]):
            start = clock()
            run()
            seconds.append(clock() - start)
        return {"seconds": seconds}
    peer.output().astype("float32").tofile(body["file"])
    return "written"


def peer_by(word, name):
    if word == "embed-worker":
        return importlib.import_module(f"embed_{name.split('-')[0]}").Peer(name)
    if word == "backward-worker":
        return importlib.import_module(f"backward_{name}").Peer()
    module, *setting = name.split("-")
    return importlib.import_module(f"with_{module}").Peer(*setting)


def main(word, name):
    # Libraries print what they like; it must not get between the lines.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(reply):
        print(json.dumps(reply), file=lines, flush=True)

    try:
        peer = peer_by(word, name)
    except Unsupported as why:
        say({"unsupported": {"why": str(why)}})
        return
    say({"ready": {"version": peer.version}})
    for line in sys.stdin:
        try:
            reply = answer(peer, json.loads(line))
        except Unsupported as why:
            reply = {"unsupported": {"why": str(why)}}
        except Exception as error:  # Whatever a library raises is its answer.
            reply = {"failed": {"why": f"{type(error).__name__}: {error}".replace("\n", " ")}}
        say(reply)


if __name__ == "__main__":
    # So that peers find Unsupported in the module that catches it.
    sys.modules["worker"] = sys.modules[__name__]
    main(*sys.argv[1:])
