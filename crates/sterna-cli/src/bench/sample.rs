//! The measured downtime of one run with its parts, and statistics over many runs.

use serde::Serialize;
use sterna::{IncomingStatistics, Statistics, SwitchoverStep};

/// The downtime of one run and its consecutive parts, in milliseconds. The parts add up to `downtime`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Sample {
    /// From the decision to stop the guest until the guest runs at the destination.
    pub downtime: f64,
    /// Time to stop vCPUs and devices, and for the last sync and the last pages.
    pub stop: f64,
    /// From the end of `stop` until the slowest device was read. Pages and chunks are sent during this time.
    pub save: f64,
    /// From the end of `save` until the last chunk was sent.
    pub transfer: f64,
    /// From the end of `transfer` until the destination has loaded everything.
    pub load: f64,
    /// The commit, and the start of the guest.
    pub start: f64,
    /// Most bytes that the destination buffered for one device.
    pub peak_bytes: u64,
    /// Bytes per second of RAM while the guest ran.
    pub live_ram: f64,
    /// Bytes per second of device state while the guest ran.
    pub live_streams: f64,
}

impl Sample {
    /// The parts of a completed migration, from the statistics of both sides.
    pub fn of(statistics: &Statistics, incoming: &IncomingStatistics) -> Self {
        let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let steps = |wanted: &[SwitchoverStep]| -> f64 {
            let taken = statistics.switchover.iter().filter(|(step, _)| wanted.contains(step));
            taken.map(|(_, took)| milliseconds(*took)).sum()
        };
        let downtime = statistics.downtime.map(milliseconds).unwrap_or_default();
        let stop = steps(&[SwitchoverStep::Stop, SwitchoverStep::ReleaseHooks]);
        // Reading starts when all devices have stopped, in parallel with the last pages.
        let pages = steps(&[SwitchoverStep::LastSync, SwitchoverStep::LastPages]);
        let sent = pages + steps(&[SwitchoverStep::Streams]);
        let slowest = statistics.streams.iter().map(|stream| milliseconds(stream.took)).fold(0.0, f64::max);
        let save = slowest.min(sent);
        let start = steps(&[SwitchoverStep::Start]);
        let paused = statistics.downtime.unwrap_or_default();
        let live =
            statistics.total_time.saturating_sub(statistics.setup_time + paused).as_secs_f64().max(1e-6);
        let streamed: u64 = statistics.streams.iter().map(|stream| stream.running_bytes).sum();
        Self {
            downtime,
            stop,
            save,
            transfer: sent - save,
            load: (downtime - stop - sent - start).max(0.0),
            start,
            peak_bytes: incoming.streams.iter().map(|stream| stream.peak_bytes).max().unwrap_or_default(),
            live_ram: statistics.precopy_bytes.saturating_sub(streamed) as f64 / live,
            live_streams: streamed as f64 / live,
        }
    }
}

/// Sorted values of many runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution(Vec<f64>);

impl Distribution {
    /// Sorts `values`, which may be in any order.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The value that a share `part` (0 to 1) of all values does not exceed. Between two values, it is
    /// interpolated linearly. NaN without values.
    pub fn quantile(&self, part: f64) -> f64 {
        let Some(last) = self.0.len().checked_sub(1) else { return f64::NAN };
        let at = part.clamp(0.0, 1.0) * last as f64;
        let (low, share) = (at.floor() as usize, at.fract());
        self.0[low] + share * (self.0[(low + 1).min(last)] - self.0[low])
    }

    /// The median; NaN without values.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Half the width of the 95 % confidence interval of the median, as a share of the median.
    /// It makes no assumption about the distribution. `None`: too few values.
    pub fn uncertainty(&self) -> Option<f64> {
        let count = self.0.len() as f64;
        // Ranks of the ends of the interval, by the normal approximation of the binomial distribution.
        let reach = 0.98 * count.sqrt();
        let (low, high) = ((count / 2.0 - reach).floor(), (count / 2.0 + reach).ceil());
        if count < 6.0 || low < 0.0 || high >= count {
            return None;
        }
        let width = self.0[high as usize] - self.0[low as usize];
        Some(width / 2.0 / self.median().max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn quantile_of_known_values() {
        let values = Distribution::new([4.0, 1.0, 3.0, 2.0, 5.0]);

        assert_eq!(values.median(), 3.0);
        assert_eq!((values.quantile(0.0), values.quantile(1.0)), (1.0, 5.0));
        assert_eq!(values.quantile(0.25), 2.0);
        assert!((values.quantile(0.99) - 4.96).abs() < 1e-9);
    }

    #[test]
    fn uncertainty_shrinks_with_more_values_and_is_unknown_of_few() {
        let spread = |count: u32| Distribution::new((0..count).map(|i| 100.0 + f64::from(i * 7 % 10)));

        assert_eq!(spread(5).uncertainty(), None);
        let (few, many) = (spread(10).uncertainty().unwrap(), spread(1000).uncertainty().unwrap());
        assert!(many < few, "{many} {few}");
        assert!(many < 0.01);
    }

    #[test]
    fn sample_parts_add_up_to_the_pause() {
        let statistics = crate::samples::engine_statistics();
        let incoming = IncomingStatistics {
            status: sterna::Status::Completed,
            error: None,
            received_bytes: 0,
            normal_pages: 0,
            zero_pages: 0,
            cleared_pages: 0,
            streams: Vec::new(),
            rdma: None,
            postcopy: None,
        };

        let sample = Sample::of(&statistics, &incoming);

        let sum = sample.stop + sample.save + sample.transfer + sample.load + sample.start;
        assert!((sum - sample.downtime).abs() < 1e-6, "{sample:?}");
        assert_eq!(statistics.downtime, Some(Duration::from_secs_f64(sample.downtime / 1e3)));
    }
}
