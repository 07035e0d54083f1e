"""Chat templates of model families, small, and what each makes of a conversation, by hand.

The templates show what those of Qwen 2.5 and Hermes 2 Pro, Llama 3.1, and Mistral Instruct v0.3
show of users, assistants, functions, calls and results. A ``Family`` says the same a second time in
Python, without Jinja: the text of each part and who says it.
"""

import json
from dataclasses import dataclass
from typing import Any

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files

QWEN = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for t in tools %}"
    "{{ (t | tojson) + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' + '
    "(c.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only one call at once') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' + '
    "(m.tool_calls[0].function.arguments | tojson) + '}' }}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
    "{% if tools and loop.first %}{{ 'Functions:\\n' }}{% for t in tools %}"
    "{{ (t | tojson) + '\\n\\n' }}{% endfor %}{% endif %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL3 = (
    "{{ bos_token }}{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == users[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}"
    "{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or "
    "m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{{ \'[TOOL_RESULTS] {"content": \' + m.content + \', "call_id": "\' + m.tool_call_id + '
    "'\"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)


def tokenizer_of(template, *tokens, eos="<|im_end|>", bos="<|im_start|>"):
    """The byte-level tokenizer with a template, further special tokens and another end."""
    files = byte_level_tokenizer().files()
    config = json.loads(files["tokenizer_config.json"])
    config |= {"chat_template": template, "eos_token": eos, "bos_token": bos, "pad_token": eos}
    config["added_tokens_decoder"] = {
        str(number): {"content": token, "special": True} for number, token in enumerate(tokens, 259)
    }
    return tokenizer_from_files({**files, "tokenizer_config.json": json.dumps(config).encode()})


def qwen():
    return tokenizer_of(QWEN, "<tool_call>", "</tool_call>")


def llama3():
    return tokenizer_of(
        LLAMA3,
        *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ).with_end_tokens(["<|eom_id|>"])


def mistral3():
    tokens = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
    return tokenizer_of(MISTRAL3, *tokens, eos="</s>", bos="<s>")


@dataclass
class Family:
    """What a template makes of the parts of a conversation; texts but for ``ends``.

    ``ends``: tokens that the policy may end an answer with. ``closing``: behind an answer that was
    cut; ``rest``: behind one that ended.
    """

    make: Any
    form: str
    ends: tuple[str, ...]
    closing: str
    rest: str
    opens: str

    def first(self, text: str, tools: Any) -> str:
        """The first message of a user."""
        shown = [json.dumps(tool, ensure_ascii=False) for tool in tools or []]
        if self.form == "hermes":
            lines = "".join(f"{one}\n" for one in shown)
            head = f"<|im_start|>system\n# Tools\n{lines}<|im_end|>\n" if tools else ""
            return head + self.user(text)
        if self.form == "llama3":
            head = "Functions:\n" + "".join(f"{one}\n\n" for one in shown) if tools else ""
            head = f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{head}"
            return f"{head}{text.strip()}<|eot_id|>"
        listed = f"[AVAILABLE_TOOLS] [{', '.join(shown)}][/AVAILABLE_TOOLS]" if tools else ""
        return f"<s>{listed}{self.user(text)}"

    def user(self, text: str) -> str:
        """A further message of a user."""
        if self.form == "hermes":
            return f"<|im_start|>user\n{text}<|im_end|>\n"
        if self.form == "llama3":
            return f"<|start_header_id|>user<|end_header_id|>\n\n{text.strip()}<|eot_id|>"
        return f"[INST] {text}[/INST]"

    def results(self, messages: Any) -> str:
        """Messages of tools behind one answer."""
        if self.form == "hermes":
            each = [f"\n<tool_response>\n{m['content']}\n</tool_response>" for m in messages]
            return f"<|im_start|>user{''.join(each)}<|im_end|>\n"
        if self.form == "llama3":
            head = "<|start_header_id|>ipython<|end_header_id|>\n\n"
            each = [json.dumps(m["content"], ensure_ascii=False) for m in messages]
            return "".join(f"{head}{one}<|eot_id|>" for one in each)
        each = [
            f'{{"content": {m["content"]}, "call_id": "{m["tool_call_id"]}"}}' for m in messages
        ]
        return "".join(f"[TOOL_RESULTS] {one}[/TOOL_RESULTS]" for one in each)

    def calls(self, calls: Any) -> str:
        """Calls (name, arguments, id) as the model writes them."""
        if self.form == "hermes":
            each = [json.dumps({"name": name, "arguments": given}) for name, given, _ in calls]
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)
        if self.form == "llama3":
            each = [json.dumps({"name": name, "parameters": given}) for name, given, _ in calls]
            return "; ".join(each)
        each = [
            json.dumps({"name": name, "arguments": given, "id": number})
            for name, given, number in calls
        ]
        return f"[TOOL_CALLS] [{', '.join(each)}]"


IM = "<|im_end|>"
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
FAMILIES = {
    "qwen": Family(qwen, "hermes", (IM,), f"{IM}\n", "\n", "<|im_start|>assistant\n"),
    "llama3": Family(llama3, "llama3", ("<|eot_id|>", "<|eom_id|>"), "<|eot_id|>", "", HEADER),
    "mistral": Family(mistral3, "mistral", ("</s>",), "</s>", "", ""),
}
