"""What every room needs: messages, durations, argument checks, optional packages, lazy exports.

The lowest room: it imports nothing of Treadle, and never torch.
"""
