"""Chat templates of the kinds that transformers' and vLLM's tests have, rendered as transformers renders them.

The templates are rebuilt here, one for each form that models' templates have.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.chat_template import compile_template, render
from cluster.text import BaseText, TextError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü<&>"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": ["string", "null"], "enum": ["x", "é"]}, "a": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
]
SHORT: list[dict[str, Any]] = [{"role": "user", "content": " Grüße & <b> \n"}]
LONG: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind.\n"},
    {"role": "user", "content": " What is 1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I add."},
    {"role": "tool", "content": "3", "name": "add", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "<think>so</think>\n\nIt is 3. "},
    {"role": "user", "content": "Thanks"},
]
VALUES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"documents": [{"title": "t", "text": "é"}]},
    {"enable_thinking": False},
]

TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content']}}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>' + '\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "alpaca": "{{ (messages|selectattr('role', 'equalto', 'system')|list|last).content|trim "
    "if (messages|selectattr('role', 'equalto', 'system')|list) else '' }}\n\n"
    "{% for m in messages %}\n{% if m['role'] == 'user' %}\n### Instruction:\n{{ m['content']|trim -}}\n"
    "{% if not loop.last %}\n\n{% endif %}\n{% elif m['role'] == 'user_context' %}\n{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n\n### Response:\n{% endif %}",
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for m in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%Y') %}{%- else %}{%- set date_string = '26 Jul' %}{%- endif %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- date_string }}\n"
    "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}"
    "{%- endif %}"
    "{%- for m in messages %}{%- if 'tool_calls' in m %}{%- if not m.tool_calls|length == 1 %}"
    "{{- raise_exception('one call') }}{%- endif %}{%- set call = m.tool_calls[0].function %}"
    "{{- call.name + '(' }}{%- for n, v in call.arguments | items %}{{- n + '=' + v|string }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
    "{%- elif m.role == 'tool' or m.role == 'ipython' %}{%- if m.content is mapping or m.content is iterable %}"
    "{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}{%- else %}{{- m['content'] | trim }}{%- endif %}"
    "{%- endfor %}",
    "hermes": "{%- macro kind(spec) %}{%- set basic = {'string': 'str', 'integer': 'int'} %}"
    "{%- if basic[spec.type] is defined %}{{- basic[spec.type] }}"
    "{%- elif spec.type is iterable and spec.type|length > 1 %}"
    "{{- 'Union[' }}{%- for t in spec.type %}{{- kind({'type': t}) }}{%- if not loop.last %},{%- endif %}{%- endfor %}"
    "{{- ']' }}{%- else %}{{- 'Any' }}{%- endif %}{%- endmacro %}{{- bos_token }}{%- for t in tools or [] %}"
    "{%- if t.function is defined %}{%- set t = t.function %}{%- endif %}{{- '{\"type\": \"function\", ' }}"
    "{%- for n, f in t.parameters.properties|items %}{{- n + ': ' + kind(f) }}{%- endfor %}{{- t.parameters|tojson }}"
    "{%- endfor %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<tool>' }}{%- endif %}{{- m.content }}"
    "{%- if not loop.last and loop.nextitem.role != 'tool' %}{{- '</tool>' }}{%- elif loop.last %}.{%- endif %}"
    "{%- else %}{{- m.role ~ m.content }}{%- endif %}{%- endfor %}",
    "mistral": "{%- if messages[0]['role'] == 'system' %}{%- set sys = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace() %}"
    "{%- set ns.index = 0 %}"
    "{%- for m in rest %}{%- if not (m.role == 'tool' or m.role == 'tool_results' or "
    "(m.tool_calls is defined and m.tool_calls is not none)) %}"
    "{%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for m in rest %}"
    "{%- if m.role == 'user' %}{%- if tools is not none and (m == users[-1]) %}{{- '[AVAILABLE_TOOLS][' }}"
    "{%- for t in tools %}{%- set t = t.function %}{%- for k, v in t.items() if k != 'return' %}"
    "{%- if v is string %}{{- '\"' + k + '\": \"' + v + '\"' }}{%- else %}{{- k + ': ' + v|tojson }}{%- endif %}"
    "{%- endfor %}{%- endfor %}{{- ']' }}{%- endif %}{%- if loop.last and sys is defined %}"
    "{{- '[INST]' + sys + '\\n\\n' + m['content'] }}{%- else %}{{- '[INST]' + m['content'] }}{%- endif %}"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{%- for c in m.tool_calls %}"
    "{%- set out = c.function|tojson %}{{- out[:-1] }}{%- if not c.id is defined or c.id|length != 9 %}"
    "{{- raise_exception('ids of nine') }}{%- endif %}{{- ', \"id\": \"' + c.id + '\"}' }}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m['content']|trim + eos_token }}{%- endif %}{%- endfor %}",
    "qwen3": "{%- set ns = namespace(many=true, last=messages|length - 1) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.many and m.role == 'user' and m.content is string "
    "and not(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set ns.many = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set reasoning = '' %}{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in m.content %}"
    "{%- set reasoning = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- m.role + ':' + reasoning.strip('\\n') + '|' + m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{%- if m.tool_calls %}{%- for c in m.tool_calls %}{%- if c.function %}{%- set c = c.function %}{%- endif %}"
    "{{- c.name }}{%- if c.arguments is string %}{{- c.arguments }}{%- else %}{{- c.arguments | tojson }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}",
    "qwen3 coder": "{% macro extra(spec, done) %}{%- if spec is mapping %}{%- for k in spec if k not in done %}"
    "{%- if spec[k] is mapping or (spec[k] is sequence and spec[k] is not string) %}"
    "{{- '\\n<' ~ k ~ '>' ~ (spec[k] | tojson | safe) ~ '</' ~ k ~ '>' }}{%- else %}"
    "{{- '\\n<' ~ k ~ '>' ~ (spec[k] | string) ~ '</' ~ k ~ '>' }}{%- endif %}{%- endfor %}{%- endif %}{% endmacro %}"
    "{%- if tools is iterable and tools | length > 0 %}{%- for t in tools %}{%- if t.function is defined %}"
    "{%- set t = t.function %}{%- endif %}{{- extra(t, ['name']) }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{{ m.content | default('', true) | trim }}{%- for c in m.tool_calls or [] %}"
    "{%- for n, v in c.function.arguments|items %}{%- set v = v if v is string else v | tojson | safe %}{{ n ~ v }}"
    "{%- endfor %}{%- endfor %}{%- endfor %}",
    "deepseek": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, prompt='', is_first_sp=true) %}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.prompt = ns.prompt + m['content'] %}"
    "{% set ns.is_first_sp = false %}{%- else %}{% set ns.prompt = ns.prompt + '\n' + m['content'] %}"
    "{%- endif %}{%- endif %}"
    "{%- endfor %}{{ bos_token }}{{ ns.prompt }}{%- for m in messages %}{% set content = m['content'] %}"
    "{%- if m['role'] == 'assistant' and 'tool_calls' in m %}{%- for c in m['tool_calls'] %}"
    "{{ c['type'] + '<sep>' + c['function']['name'] + '\n```json\n' + c['function']['arguments'] | tojson + '\n```' }}"
    "{%- endfor %}{%- elif m['role'] == 'assistant' %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<A>' + content + eos_token }}{%- endif %}"
    "{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{ '<A>' }}{% endif %}",
    "gpt oss": "{%- macro typed(spec, depth=0) -%}{%- if spec.type == 'object' -%}{{- '{' }}"
    "{%- for n, s in spec.properties.items() -%}{{- n }}{%- if n not in (spec.required or []) -%}?{%- endif -%}: "
    "{{ typed(s, depth + 1) }}{%- if not loop.last -%}, {%- endif -%}{%- endfor -%}{{- '}' }}"
    "{%- elif spec.type is not string -%}{{ spec.type | join(' | ') }}{%- else -%}{{ spec.type }}{%- endif -%}"
    "{%- endmacro -%}{{- 'Current date: ' + strftime_now('%Y-%m') + '\\n' }}{%- for t in tools or [] -%}"
    "{{- typed(t.function.parameters) }}{%- endfor -%}{%- set last = namespace(name=none) %}{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{%- if 'thinking' in m and m.thinking -%}<analysis>{{ m.thinking }}{%- endif -%}"
    "{%- if 'tool_calls' in m -%}{%- set last.name = m.tool_calls[0].function.name -%}{{ last.name }}{%- endif -%}"
    "{%- elif m.role == 'tool' -%}{%- if last.name is none -%}{{ raise_exception('no call before') }}{%- endif -%}"
    "{{ last.name }}={{ m.content|tojson }}{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}",
    "command r": "{% if documents %}{% for d in documents %}Document: {{ loop.index0 }}\n{% for k, v in d.items() %}"
    "{{ k|title }}: {{ v }}\n{% endfor %}{% endfor %}{% endif %}{{ messages | map(attribute='role') | join(',') }}"
    "{% for m in messages if m.role in ['user'] %}{{ m.content | indent(2) | upper }}{% else %}none{% endfor %}",
    "gemma": "{{ bos_token }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% elif m['content'] is iterable %}"
    "{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}",
    "granite": "{%- if tools %}{{- '<tools>' + (tools | tojson(indent=4)) }}{%- endif %}{%- if documents %}"
    "{{- documents | tojson(indent=4) }}{%- endif %}{{- strftime_now('%B %Y') }}{%- for m in messages %}"
    "{{- m.role + m['content'] + '\\n' }}{%- endfor %}",
    "smollm3": "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- generation -%}"
    "{%- set x = 'inner' -%}{{ m.content.lstrip('\\n') }}{{ x }}{%- endgeneration -%}{%- else -%}{{ m.content }}"
    "{%- endif -%}{{ x }}{%- endfor -%}",
    "generation in lines": "{{ bos_token }}\n{% for m in messages %}\n  {% if m.role == 'assistant' %}\n"
    "  {% generation %}\n  A:{{ m.content }}\n  {% endgeneration %}\n  {% else %}\nU:{{ m.content }}\n  "
    "{% endif %}\n{% endfor %}",
    "json keywords": "{{ tools | tojson(ensure_ascii=True) }}{{ tools | tojson(separators=(',', ':')) }}"
    "{{ tools | tojson(sort_keys=true, indent=2) }}{{ messages | tojson(False, 1) }}"
    "{{ messages | tojson(indent='  ') }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "dict and namespace": "{% set d = dict(messages[0], role='x') %}{{ d.role }}{{ dict.fromkeys(['a', 'b'], 1) }}"
    "{% set ns = namespace(self=1, n={}) %}{{ ns.self }}{% set ns.n = dict(a=2) %}{{ ns.n.a }}{{ dict(a=1) | tojson }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token is defined }}",
    "filters": "{{ messages | groupby('role') | map('first') | join(',') }}{{ messages | last | items | list }}"
    "{{ messages | length }}{{ 'a b' | replace(' ', '_') | capitalize }}{{ [3, 1] | sort | first }}"
    "{{ messages[0].content | e }}{{ '%s!' | format('x') }}{{ 3.7 | int }}{{ {'b': 1, 'a': 2} | dictsort }}"
    "{{ messages[0].content.encode('utf-8') | length if false else '' }}{{ [[1, 2], [3]] | sum(start=[]) }}",
    "macros": "{% macro turn(m, mark='#') %}{{ mark }}{{ m.role }}{{ caller() if caller is defined else '' }}"
    "{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% call turn(m, mark='*') %}{{ m.content }}{% endcall %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    source = TEMPLATES[name]
    ours = compile_template(source)
    for messages in (SHORT, LONG, LONG[1:]):
        for values in VALUES:
            try:
                (expected,), _ = render_jinja_template(
                    [messages], chat_template=source, add_generation_prompt=True, **SPECIAL, **values
                )
            except Exception as error:  # a template refuses some conversations
                with pytest.raises(type(error)):
                    _rendered(ours, messages, values)
                continue
            assert _rendered(ours, messages, values) == expected


def _rendered(template: Any, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
    """The values that the template reads, since calls with others are refused."""
    read = {name: value for name, value in values.items() if name in template.variables}
    return render(template, messages, SPECIAL, answer=True, variables=read)


@pytest.fixture(scope="module")
def base(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(stories_dir, directory)
    return directory


def _settings(directory: Path, **changes: Any) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


@pytest.mark.parametrize("in_files", [True, False])
def test_named_templates_are_chosen_as_transformers_chooses_them(base: Path, tmp_path: Path, in_files: bool) -> None:
    directory = tmp_path / "model"
    shutil.copytree(base, directory)
    named = {
        "default": "default{{ messages[0].content }}",
        "tool_use": "tools{{ tools | length }}",
        "rag": "{% oops %}",
    }
    if in_files:
        (directory / "chat_template.jinja").write_text(named["default"])
        (directory / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (directory / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    else:
        _settings(directory, chat_template=[{"name": name, "template": text} for name, text in named.items()])
    text, reference = BaseText(directory), AutoTokenizer.from_pretrained(directory)
    assert not text.template_problem
    for tools in (None, TOOLS):
        expected = reference.apply_chat_template(SHORT, tools=tools, add_generation_prompt=True, return_dict=False)
        assert text.encode_chat(SHORT, variables={} if tools is None else {"tools": tools}) == expected


def test_special_tokens_are_those_of_transformers(base: Path, tmp_path: Path) -> None:
    """Also those that an older tokenizer names in a file of their own."""
    directory = tmp_path / "model"
    shutil.copytree(base, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_bytes())
    for name in ("added_tokens_decoder", "bos_token", "eos_token"):
        settings.pop(name, None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None, "sep_token": "</s>"}))
    older = {
        "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    }
    (directory / "special_tokens_map.json").write_text(json.dumps({**older, "eos_token": "</s>"}))
    reference = AutoTokenizer.from_pretrained(directory)
    ours = BaseText(directory).special
    assert {name: text for name, text in reference.special_tokens_map.items() if name in ours} == ours
    assert ours.keys() >= {"bos_token", "eos_token", "sep_token"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("line\n{% for m in messages %}", "line 2"),
        ("{{ messages | nothing }}", "nothing"),
        (b"\xff\xfe", "can't be read"),
    ],
)
def test_a_template_that_fails_costs_chats_alone(base: Path, tmp_path: Path, source: Any, reason: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(base, directory)
    (directory / "chat_template.jinja").write_bytes(source if isinstance(source, bytes) else source.encode())
    text = BaseText(directory)
    assert reason in text.template_problem
    assert text.encode_prompt("Once") == BaseText(base).encode_prompt("Once")
    with pytest.raises(TextError, match=r"chat template can't be .*send `prompt`"):
        text.encode_chat(SHORT)


def test_templates_without_a_default_are_a_problem(base: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(base, directory)
    _settings(directory, chat_template=[{"name": "rag", "template": "x"}])
    text = BaseText(directory)
    assert "rag" in text.template_problem
    with pytest.raises(TextError, match="none named default"):
        text.encode_chat(SHORT)
