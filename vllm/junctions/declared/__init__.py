# SPDX-License-Identifier: Apache-2.0
"""Marks on chat messages: where a client says that its shared prefix ends.

Works in the process that renders chats, an API server or ``LLM``. What comes of a mark
is a token position in the request's ``kv_transfer_params``; the scheduler's side reads
no marks.
"""
