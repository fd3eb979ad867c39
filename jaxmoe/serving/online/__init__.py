"""Requests that arrive over time: engines that batch them, and when each token comes."""
