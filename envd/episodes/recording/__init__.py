"""Recordings of episodes: frames and steps as they happen, for replays and videos. Off unless a directory is set."""
