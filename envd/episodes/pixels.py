"""Re-attach pixels to a response that a previous daemon recorded, if the screen still shows that frame."""

from dataclasses import replace

from envd.base.errors import EnvdError
from envd.episodes.episode import Episode
from envd.guest.observation import Encoding, Observation, ObservationOptions


async def with_pixels(observation: Observation, episode: Episode | None, options: ObservationOptions) -> Observation:
    """Return the observation with its pixels if the screen still shows them, else unchanged. Resumes no guest.

    Args:
        observation: As recorded, without pixels.
        episode: The observed episode; None if it is gone.
        options: The options of the request.
    """
    if options.encoding is Encoding.NONE or episode is None or episode.machine.lost.is_set():
        return observation
    desktop = episode.machine.desktop
    try:
        frame = await desktop.frame()
        if frame.frame_id != observation.frame.frame_id:
            return observation
        encoded = await desktop.encode(frame, options)
    except EnvdError:
        return observation  # the recorded response is valid even if the machine fails now
    return replace(observation, frame=replace(encoded, capture_time=observation.frame.capture_time))
