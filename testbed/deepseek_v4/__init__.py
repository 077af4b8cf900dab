# SPDX-License-Identifier: Apache-2.0
"""What vLLM's DeepSeek-V4 lacks to run on a plain x86 CPU, for the test bed only.

vLLM 0.32.0 has the whole model for CPUs, kernels included, except for a few
helpers that build attention metadata and exist as Triton kernels only. ``kernels``
computes the same with PyTorch, ``stand_ins`` puts that into a running vLLM.
"""
