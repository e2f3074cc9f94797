"""Serve one base LLM with thousands of LoRA adapters on one device."""
