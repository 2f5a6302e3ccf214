import json
from pathlib import Path

import pytest
import yaml

from app import vllm_args
from app.check import application_of
from app.config import AppConfig, load
from app.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path):
    """A folder with what vLLM reads before it loads weights."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_hidden_layers": 2,
                "intermediate_size": 128,
                "vocab_size": 128,
                "max_position_embeddings": 2048,
                "torch_dtype": "bfloat16",
            }
        )
    )
    return {"path": str(tmp_path)}


def faults(fields):
    with pytest.raises(ConfigError) as refused:
        vllm_args.check(load(fields))
    return str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"routing": {"treshold": 1}}, ["routing.treshold=1", "no such field"]),
        ({"routing": {"threshold_tokens": -1}}, ["routing.threshold_tokens=-1", "greater than or equal to 0"]),
        ({"prefill": {"replicas": 0}}, ["prefill.replicas=0"]),
        ({"kv": {"connector": "carrier-pigeon"}}, ["kv.connector='carrier-pigeon'", "nixl"]),
        ({"engine_args": {"max_modle_len": 1}}, ["engine_args.max_modle_len=1", "did you mean max_model_len?"]),
        ({"decode": {"engine_args": {"block-size": 1}}}, ["decode.engine_args.block-size", "did you mean block_size?"]),
        ({"router": {"server_args": {"tool_parser": 1}}}, ["router.server_args.tool_parser", "did you mean tool_call_parser?"]),
        ({"engine_args": {"model": "x"}}, ["engine_args.model='x'", "model.path"]),
        ({"prefill": {"engine_args": {"kv_transfer_config": {}}}}, ["kv_transfer_config", "the `kv` section"]),
        ({"model": {"path": "/nowhere/llama"}}, ["model.path='/nowhere/llama'", "config.json"]),
        ({"prefill": {"engine_args": {"block_size": 16}}, "decode": {"engine_args": {"block_size": 32}}}, ["block_size=16", "block_size=32", "set block_size once"]),
        ({"prefill": {"engine_args": {"dtype": "float32"}}}, ["dtype='float32'", "None"]),
        ({"decode": {"engine_args": {"kv_cache_dtype": "fp8"}}}, ["kv_cache_dtype='fp8'"]),
        ({"prefill": {"engine_args": {"tensor_parallel_size": 4}}, "decode": {"engine_args": {"tensor_parallel_size": 2}}}, ["tensor_parallel_size=4", "tensor_parallel_size=2", "lower prefill's or raise decode's"]),
        ({"prefill": {"engine_args": {"tensor_parallel_size": 2}}, "decode": {"engine_args": {"tensor_parallel_size": 3}}}, ["must divide"]),
        ({"prefill": {"side_channel_ports": {"first": 21050}}}, ["21050-21149", "21000-21099", "separate ranges"]),
        ({"prefill": {"side_channel_ports": {"first": 65500}}}, ["65599", "65535"]),
        ({"prefill": {"replicas": 2, "cpu_binding": ["0"]}}, ["prefill.cpu_binding", "one per replica"]),
    ],
)  # fmt: skip
def test_each_fault_names_field_value_and_remedy(model, fields, words):
    message = faults({"model": model} | fields)
    for word in words:
        assert word in message


def test_a_threshold_above_the_context_length_is_refused(model):
    message = faults({"model": model, "routing": {"threshold_tokens": 4096}})
    assert "routing.threshold_tokens=4096" in message and "2048" in message


def test_all_faults_are_told_at_once(model):
    message = faults({"model": model, "engine_args": {"a_b_c": 1}, "decode": {"engine_args": {"d_e_f": 1}}})
    assert len(message.splitlines()) == 2


def test_a_file_that_is_missing_or_not_yaml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="mapping"):
        load(tmp_path / "list.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_in_configs_is_well_formed(path):
    load(path)


def test_the_published_schema_is_the_code_s():
    assert json.loads((ROOT / "configs/schema.json").read_text()) == AppConfig.model_json_schema()


def test_a_serve_config_file_may_hold_the_configuration_inline_or_name_it(tmp_path):
    def written(args):
        path = tmp_path / "serve.yaml"
        path.write_text(yaml.safe_dump({"applications": [{"name": "pd", "args": args}]}))
        return application_of(path)

    assert written({"config": {"mode": "colocated"}}) == {"mode": "colocated"}
    assert written({"config": "a.yaml"}) == tmp_path / "a.yaml"
    assert application_of(ROOT / "configs/embedded.yaml") == ROOT / "configs/embedded.yaml"


def test_role_arguments_override_the_shared_ones():
    config = load({"engine_args": {"max_num_seqs": 1, "seed": 2}, "decode": {"engine_args": {"max_num_seqs": 8}}})
    assert config.args_of(config.decode) == {"max_num_seqs": 8, "seed": 2}
    assert config.args_of(config.prefill) == {"max_num_seqs": 1, "seed": 2}
