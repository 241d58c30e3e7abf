"""Chats with a GPT of examples/train_gpt.py, by a server that this program starts and ends.

    ./scripts/train --minutes 2
    pip install ".[serve]" openai
    python examples/serve.py runs/gpt
    python examples/serve.py runs/gpt --ask "def main" --max-tokens 40

Such a model continues texts, so the template only joins the messages. The tokenizer of a model that follows
instructions has a template of its own.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

import openai

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a run with checkpoints")
    parser.add_argument("--ask", help="one message, in place of those that are typed")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        template = pathlib.Path(folder, "chat.jinja")
        template.write_text(TEMPLATE)
        command = [sys.executable, "-m", "shardfn", "serve", args.model, "--name", "gpt", "--port", "0"]
        command += ["--chat-template", str(template), "--running", "3", "--budget", "4"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            chat(url_of(server), args)
        finally:
            server.terminate()
            server.communicate()


def url_of(server):
    """The server's address, which it prints when it is ready."""
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"ready at (\S+),", line):
            return found[1]
    raise SystemExit("the server has ended")


def chat(url, args):
    client = openai.OpenAI(base_url=url, api_key="none")
    messages = []
    while text := args.ask or read():
        messages.append({"role": "user", "content": text})
        stream = client.chat.completions.create(
            model="gpt", messages=messages, max_tokens=args.max_tokens, temperature=args.temperature, stream=True
        )
        pieces = []
        for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")
            print(pieces[-1], end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})
        if args.ask:
            return


def read():
    """A line, or an empty text at the end."""
    try:
        return input("> ")
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
