"""Keys that transformers 5.23.0 reads in `config.json`, written by `make family-defaults`.

By family: `keys` that are read with their defaults, those that may be null, and `ignored`
keys of the configuration class, which change nothing. Read by `family_keys`.
"""

from typing import Any

VERSION = "5.23.0"
# fmt: off
FAMILIES: dict[str, dict[str, Any]] = {
    'gemma': {
        'class': 'GemmaForCausalLM',
        'keys': {'attention_bias': False, 'bos_token_id': 2, 'eos_token_id': 1, 'head_dim': 256,
            'hidden_act': 'gelu_pytorch_tanh', 'hidden_size': 3072, 'intermediate_size': 24576,
            'max_position_embeddings': 8192, 'num_attention_heads': 16, 'num_hidden_layers': 28,
            'num_key_value_heads': 16, 'original_max_position_embeddings': None,
            'partial_rotary_factor': None, 'rms_norm_eps': 1e-06, 'rope_parameters': None,
            'rope_scaling': None, 'rope_theta': 10000.0, 'tie_word_embeddings': True,
            'vocab_size': 256000},
        'nullable': ['bos_token_id', 'eos_token_id', 'original_max_position_embeddings',
            'partial_rotary_factor', 'rope_parameters', 'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': 0,
            'use_bidirectional_attention': None, 'use_cache': True},
    },
    'gemma2': {
        'class': 'Gemma2ForCausalLM',
        'keys': {'attention_bias': False, 'attn_logit_softcapping': 50.0, 'bos_token_id': 2,
            'eos_token_id': 1, 'final_logit_softcapping': 30.0, 'head_dim': 256,
            'hidden_activation': 'gelu_pytorch_tanh', 'hidden_size': 2304, 'intermediate_size':
            9216, 'layer_types': None, 'max_position_embeddings': 8192, 'num_attention_heads': 8,
            'num_hidden_layers': 26, 'num_key_value_heads': 4, 'original_max_position_embeddings':
            None, 'partial_rotary_factor': None, 'query_pre_attn_scalar': 256, 'rms_norm_eps':
            1e-06, 'rope_parameters': None, 'rope_scaling': None, 'rope_theta': 10000.0,
            'sliding_window': 4096, 'tie_word_embeddings': True, 'vocab_size': 256000},
        'nullable': ['attn_logit_softcapping', 'bos_token_id', 'eos_token_id',
            'final_logit_softcapping', 'layer_types', 'original_max_position_embeddings',
            'partial_rotary_factor', 'rope_parameters', 'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': 0,
            'use_bidirectional_attention': None, 'use_cache': True},
    },
    'gemma3_text': {
        'class': 'Gemma3ForCausalLM',
        'keys': {'attention_bias': False, 'bos_token_id': 2, 'eos_token_id': 1,
            'final_logit_softcapping': None, 'head_dim': 256, 'hidden_activation':
            'gelu_pytorch_tanh', 'hidden_size': 2304, 'intermediate_size': 9216, 'layer_types':
            None, 'max_position_embeddings': 131072, 'num_attention_heads': 8,
            'num_hidden_layers': 26, 'num_key_value_heads': 4, 'partial_rotary_factor': None,
            'query_pre_attn_scalar': 256, 'rms_norm_eps': 1e-06, 'rope_local_base_freq': 10000.0,
            'rope_parameters': None, 'rope_scaling': None, 'rope_theta': 1000000.0,
            'sliding_window': 4096, 'sliding_window_pattern': 6, 'tie_word_embeddings': True,
            'use_bidirectional_attention': False, 'vocab_size': 262208},
        'nullable': ['bos_token_id', 'eos_token_id', 'final_logit_softcapping', 'layer_types',
            'partial_rotary_factor', 'rope_local_base_freq', 'rope_parameters', 'rope_scaling',
            'rope_theta', 'sliding_window_pattern', 'use_bidirectional_attention'],
        'ignored': {'attention_dropout': 0.0, 'attn_logit_softcapping': None, 'initializer_range':
            0.02, 'pad_token_id': 0, 'use_cache': True},
    },
    'glm': {
        'class': 'GlmForCausalLM',
        'keys': {'attention_bias': True, 'bos_token_id': None, 'eos_token_id': [151329, 151336,
            151338], 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 4096,
            'intermediate_size': 13696, 'max_position_embeddings': 131072, 'num_attention_heads':
            32, 'num_hidden_layers': 40, 'num_key_value_heads': 2,
            'original_max_position_embeddings': None, 'partial_rotary_factor': 0.5,
            'rms_norm_eps': 1.5625e-07, 'rope_parameters': None, 'rope_scaling': None,
            'rope_theta': 10000.0, 'tie_word_embeddings': False, 'vocab_size': 151552},
        'nullable': ['bos_token_id', 'eos_token_id', 'original_max_position_embeddings',
            'partial_rotary_factor', 'rope_parameters', 'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': 151329,
            'use_cache': True},
    },
    'glm4': {
        'class': 'Glm4ForCausalLM',
        'keys': {'attention_bias': True, 'bos_token_id': None, 'eos_token_id': [151329, 151336,
            151338], 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 4096,
            'intermediate_size': 13696, 'max_position_embeddings': 131072, 'num_attention_heads':
            32, 'num_hidden_layers': 40, 'num_key_value_heads': 2,
            'original_max_position_embeddings': None, 'partial_rotary_factor': 0.5,
            'rms_norm_eps': 1.5625e-07, 'rope_parameters': None, 'rope_scaling': None,
            'rope_theta': 10000.0, 'tie_word_embeddings': False, 'vocab_size': 151552},
        'nullable': ['bos_token_id', 'eos_token_id', 'original_max_position_embeddings',
            'partial_rotary_factor', 'rope_parameters', 'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': 151329,
            'use_cache': True},
    },
    'granite': {
        'class': 'GraniteForCausalLM',
        'keys': {'attention_bias': False, 'attention_multiplier': 1.0, 'bos_token_id': 1,
            'embedding_multiplier': 1.0, 'eos_token_id': 2, 'head_dim': None, 'hidden_act':
            'silu', 'hidden_size': 4096, 'intermediate_size': 11008, 'logits_scaling': 1.0,
            'max_position_embeddings': 2048, 'mlp_bias': False, 'num_attention_heads': 32,
            'num_hidden_layers': 32, 'num_key_value_heads': None,
            'original_max_position_embeddings': None, 'partial_rotary_factor': None,
            'residual_multiplier': 1.0, 'rms_norm_eps': 1e-06, 'rope_parameters': None,
            'rope_scaling': None, 'rope_theta': 10000.0, 'tie_word_embeddings': False,
            'vocab_size': 32000},
        'nullable': ['bos_token_id', 'eos_token_id', 'num_key_value_heads',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': None,
            'use_cache': True},
    },
    'llama': {
        'class': 'LlamaForCausalLM',
        'keys': {'attention_bias': False, 'bos_token_id': 1, 'eos_token_id': 2, 'head_dim': None,
            'hidden_act': 'silu', 'hidden_size': 4096, 'intermediate_size': 11008,
            'max_position_embeddings': 2048, 'mlp_bias': False, 'num_attention_heads': 32,
            'num_hidden_layers': 32, 'num_key_value_heads': None,
            'original_max_position_embeddings': None, 'partial_rotary_factor': None,
            'rms_norm_eps': 1e-06, 'rope_parameters': None, 'rope_scaling': None, 'rope_theta':
            10000.0, 'tie_word_embeddings': False, 'vocab_size': 32000},
        'nullable': ['bos_token_id', 'eos_token_id', 'head_dim', 'num_key_value_heads',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': None,
            'pretraining_tp': 1, 'use_cache': True},
    },
    'mistral': {
        'class': 'MistralForCausalLM',
        'keys': {'bos_token_id': 1, 'eos_token_id': 2, 'head_dim': None, 'hidden_act': 'silu',
            'hidden_size': 4096, 'intermediate_size': 14336, 'max_position_embeddings': 131072,
            'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 8,
            'original_max_position_embeddings': None, 'partial_rotary_factor': None,
            'rms_norm_eps': 1e-06, 'rope_parameters': None, 'rope_scaling': None, 'rope_theta':
            10000.0, 'sliding_window': 4096, 'tie_word_embeddings': False, 'vocab_size': 32000},
        'nullable': ['bos_token_id', 'eos_token_id', 'head_dim',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling', 'sliding_window'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': None,
            'use_cache': True},
    },
    'olmo2': {
        'class': 'Olmo2ForCausalLM',
        'keys': {'attention_bias': False, 'bos_token_id': None, 'eos_token_id': 50279, 'head_dim':
            None, 'hidden_act': 'silu', 'hidden_size': 4096, 'intermediate_size': 11008,
            'max_position_embeddings': 2048, 'num_attention_heads': 32, 'num_hidden_layers': 32,
            'num_key_value_heads': None, 'original_max_position_embeddings': None,
            'partial_rotary_factor': None, 'rms_norm_eps': 1e-05, 'rope_parameters': None,
            'rope_scaling': None, 'rope_theta': 10000.0, 'tie_word_embeddings': False,
            'vocab_size': 50304},
        'nullable': ['bos_token_id', 'eos_token_id', 'num_key_value_heads',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': 1,
            'use_cache': True},
    },
    'phi3': {
        'class': 'Phi3ForCausalLM',
        'keys': {'bos_token_id': 1, 'eos_token_id': 32000, 'head_dim': None, 'hidden_act': 'silu',
            'hidden_size': 3072, 'intermediate_size': 8192, 'max_position_embeddings': 4096,
            'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': None,
            'original_max_position_embeddings': 4096, 'partial_rotary_factor': 1.0,
            'rms_norm_eps': 1e-05, 'rope_parameters': None, 'rope_scaling': None, 'rope_theta':
            10000.0, 'sliding_window': None, 'tie_word_embeddings': False, 'vocab_size': 32064},
        'nullable': ['bos_token_id', 'eos_token_id', 'num_key_value_heads', 'rope_parameters',
            'rope_scaling', 'sliding_window'],
        'ignored': {'attention_dropout': 0.0, 'embd_pdrop': 0.0, 'initializer_range': 0.02,
            'pad_token_id': 32000, 'resid_pdrop': 0.0, 'use_cache': True},
    },
    'qwen2': {
        'class': 'Qwen2ForCausalLM',
        'keys': {'bos_token_id': None, 'eos_token_id': None, 'head_dim': None, 'hidden_act':
            'silu', 'hidden_size': 4096, 'intermediate_size': 22016, 'layer_types': None,
            'max_position_embeddings': 32768, 'max_window_layers': 28, 'num_attention_heads': 32,
            'num_hidden_layers': 32, 'num_key_value_heads': 32,
            'original_max_position_embeddings': None, 'partial_rotary_factor': None,
            'rms_norm_eps': 1e-06, 'rope_parameters': None, 'rope_scaling': None, 'rope_theta':
            10000.0, 'sliding_window': 4096, 'tie_word_embeddings': False, 'use_sliding_window':
            False, 'vocab_size': 151936},
        'nullable': ['bos_token_id', 'eos_token_id', 'layer_types', 'num_key_value_heads',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling', 'sliding_window'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': None,
            'use_cache': True},
    },
    'qwen3': {
        'class': 'Qwen3ForCausalLM',
        'keys': {'attention_bias': False, 'bos_token_id': None, 'eos_token_id': None, 'head_dim':
            128, 'hidden_act': 'silu', 'hidden_size': 4096, 'intermediate_size': 22016,
            'layer_types': None, 'max_position_embeddings': 32768, 'max_window_layers': 28,
            'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 32,
            'original_max_position_embeddings': None, 'partial_rotary_factor': None,
            'rms_norm_eps': 1e-06, 'rope_parameters': None, 'rope_scaling': None, 'rope_theta':
            10000.0, 'sliding_window': 4096, 'tie_word_embeddings': False, 'use_sliding_window':
            False, 'vocab_size': 151936},
        'nullable': ['bos_token_id', 'eos_token_id', 'layer_types', 'num_key_value_heads',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling', 'sliding_window'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': None,
            'use_cache': True},
    },
    'seed_oss': {
        'class': 'SeedOssForCausalLM',
        'keys': {'attention_bias': True, 'attention_out_bias': False, 'bos_token_id': 0,
            'eos_token_id': 2, 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 4096,
            'intermediate_size': 27648, 'mlp_bias': False, 'num_attention_heads': 80,
            'num_hidden_layers': 64, 'num_key_value_heads': 8, 'original_max_position_embeddings':
            None, 'partial_rotary_factor': None, 'rms_norm_eps': 1e-06, 'rope_parameters': None,
            'rope_scaling': None, 'rope_theta': 10000.0, 'tie_word_embeddings': False,
            'vocab_size': 155136},
        'nullable': ['bos_token_id', 'eos_token_id', 'head_dim', 'num_key_value_heads',
            'original_max_position_embeddings', 'partial_rotary_factor', 'rope_parameters',
            'rope_scaling'],
        'ignored': {'attention_dropout': 0.1, 'initializer_range': 0.02,
            'max_position_embeddings': 524288, 'pad_token_id': 1, 'pretraining_tp': 1,
            'residual_dropout': 0.1, 'use_cache': True},
    },
    'smollm3': {
        'class': 'SmolLM3ForCausalLM',
        'keys': {'attention_bias': False, 'bos_token_id': 128000, 'eos_token_id': 128001,
            'head_dim': None, 'hidden_act': 'silu', 'hidden_size': 2048, 'intermediate_size':
            11008, 'layer_types': None, 'max_position_embeddings': 32768, 'mlp_bias': False,
            'no_rope_layer_interval': 4, 'no_rope_layers': None, 'num_attention_heads': 16,
            'num_hidden_layers': 36, 'num_key_value_heads': 4, 'original_max_position_embeddings':
            None, 'partial_rotary_factor': None, 'rms_norm_eps': 1e-06, 'rope_parameters': None,
            'rope_scaling': None, 'rope_theta': 2000000.0, 'sliding_window': None,
            'tie_word_embeddings': True, 'use_sliding_window': False, 'vocab_size': 128256},
        'nullable': ['bos_token_id', 'eos_token_id', 'layer_types', 'no_rope_layers',
            'num_key_value_heads', 'original_max_position_embeddings', 'partial_rotary_factor',
            'rope_parameters', 'rope_scaling', 'sliding_window'],
        'ignored': {'attention_dropout': 0.0, 'initializer_range': 0.02, 'pad_token_id': 128004,
            'use_cache': True},
    },
    'stablelm': {
        'class': 'StableLmForCausalLM',
        'keys': {'bos_token_id': 0, 'eos_token_id': 0, 'head_dim': None, 'hidden_act': 'silu',
            'hidden_size': 2560, 'intermediate_size': 6912, 'layer_norm_eps': 1e-05,
            'max_position_embeddings': 4096, 'num_attention_heads': 32, 'num_hidden_layers': 32,
            'num_key_value_heads': 32, 'original_max_position_embeddings': None,
            'partial_rotary_factor': 0.25, 'qk_layernorm': False, 'rope_parameters': None,
            'rope_scaling': None, 'rope_theta': 10000.0, 'tie_word_embeddings': False,
            'use_parallel_residual': False, 'use_qkv_bias': False, 'vocab_size': 50304},
        'nullable': ['bos_token_id', 'eos_token_id', 'head_dim',
            'original_max_position_embeddings', 'rope_parameters', 'rope_scaling'],
        'ignored': {'attention_dropout': 0.0, 'hidden_dropout': 0.0, 'initializer_range': 0.02,
            'pad_token_id': None, 'use_cache': True},
    },
}
