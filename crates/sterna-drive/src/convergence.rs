//! Judges from the monitor's statistics whether a QEMU's migration converges (specs/convergence.md §4.4).

use std::time::Duration;

use serde_json::Value;

use super::error::DriveError;
use super::progress::Progress;
use super::settings::Settings;
use super::vm::Vm;

/// Consecutive windows without a gain that are needed for the warning.
const WINDOWS: u32 = 6;
/// A window with a gain reduces the expected downtime to at most this factor of the best.
const GAIN: f64 = 0.9;
/// Minimum length of a window: one round, or several short ones.
/// The monitor is asked ten times a second, so an answer can describe any moment of a short round.
const LEAST_WINDOW: Duration = Duration::from_secs(1);

/// The expected downtime in successive windows.
#[derive(Debug, Default)]
pub(super) struct Convergence {
    /// Start of the window, and the number of its first round.
    window: Option<(Duration, u64)>,
    /// Maximum of the remaining bytes in the window.
    most_bytes: u64,
    throttle: u64,
    /// Seconds needed to send the remaining bytes of the last window.
    needed: f64,
    /// Value of `needed` at the last gain or increase of the throttle.
    best: Option<f64>,
    /// Number of windows since `best` was set.
    fruitless: u32,
    was_said: bool,
}

impl Convergence {
    /// Evaluates the statistics at `now`. Returns true at the end of the sixth consecutive window without a gain, and of
    /// each further one, until the warning was printed.
    pub(super) fn stands_still(&mut self, now: Duration, progress: &Progress) -> bool {
        // The first round sends all of RAM. The remaining bytes after it are not known yet.
        if self.was_said
            || progress.status != "active"
            || progress.round < 2
            || progress.bandwidth_bytes <= 0.0
        {
            return false;
        }
        self.most_bytes = self.most_bytes.max(progress.remaining_bytes);
        let (began, round) = *self.window.get_or_insert((now, progress.round));
        if progress.round == round || now.saturating_sub(began) < LEAST_WINDOW {
            return false;
        }
        self.needed = self.most_bytes as f64 / progress.bandwidth_bytes;
        self.window = Some((now, progress.round));
        self.most_bytes = progress.remaining_bytes;
        let throttle = progress.throttle_percent.unwrap_or(0);
        // The effect of a stronger throttle is only visible in later windows.
        if throttle > self.throttle || self.best.is_none_or(|best| self.needed <= best * GAIN) {
            self.best = Some(self.needed);
            self.fruitless = 0;
        } else {
            self.fruitless += 1;
        }
        self.throttle = throttle;
        self.fruitless >= WINDOWS
    }

    /// The warning if the expected downtime exceeds the present limit and the throttle cannot increase. Returned once.
    pub(super) fn warning(&mut self, vm: &mut Vm, progress: &Progress) -> Result<Option<String>, DriveError> {
        let text = sentence(&Settings::read(vm)?, progress, self.needed);
        self.was_said = text.is_some();
        Ok(text)
    }
}

fn sentence(settings: &Settings, progress: &Progress, needed: f64) -> Option<String> {
    let number = |name: &str| settings.parameter(name).and_then(Value::as_u64);
    let is_on = |name: &str| settings.capability(name) == Some(true);
    let limit_ms = number("downtime-limit")?;
    let needed_ms = needed * 1e3;
    let most_throttle = number("max-cpu-throttle").unwrap_or(99);
    let can_throttle = is_on("auto-converge") && progress.throttle_percent.unwrap_or(0) < most_throttle;
    if needed_ms <= limit_ms as f64 || can_throttle {
        return None;
    }
    // QEMU's rate is an average that stays slightly below the limit.
    let limit_bytes = number("max-bandwidth").filter(|limit| *limit > 0);
    let is_held = limit_bytes.is_some_and(|limit| progress.bandwidth_bytes >= 0.8 * limit as f64);
    let mut remedies = vec!["Raise `downtime-limit`"];
    if is_held {
        remedies.push("raise `max-bandwidth`");
    } else if !is_on("multifd") {
        remedies.push("use `--cap multifd` if the link is not full");
    }
    if is_on("auto-converge") && most_throttle < 99 {
        remedies.push("raise `max-cpu-throttle`");
    } else if !is_on("auto-converge") && !is_on("dirty-limit") {
        remedies.push("slow the guest down with `--cap auto-converge`");
    }
    if !is_on("postcopy-ram") {
        remedies.push("use postcopy (`--postcopy SECONDS`)");
    }
    remedies.push("or reduce the guest's writes");
    Some(format!(
        "the migration does not converge: the guest dirties {:.1} MB/s, {:.1} MB/s can be sent{}, and the downtime \
         would be {needed_ms:.0} ms but the downtime limit is {limit_ms} ms. {}",
        progress.dirty_bytes_per_second / 1e6,
        progress.bandwidth_bytes / 1e6,
        if is_held { " under the bandwidth limit" } else { "" },
        remedies.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn round(number: u64, remaining_bytes: u64) -> Progress {
        Progress {
            status: "active".into(),
            round: number,
            remaining_bytes,
            bandwidth_bytes: 400_000.0,
            dirty_bytes_per_second: 900_000.0,
            ..Progress::default()
        }
    }

    /// The number of the round in which the warning is due. Each round lasts one second and leaves the given bytes.
    fn due(left: impl Iterator<Item = u64>, throttle: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut convergence = Convergence::default();
        (1..).zip(left).find_map(|(number, left)| {
            let progress = Progress { throttle_percent: throttle(number), ..round(number, left) };
            convergence.stands_still(Duration::from_secs(number), &progress).then_some(number)
        })
    }

    #[test]
    fn rounds_that_leave_as_much_as_before_are_noticed_after_six() {
        assert_eq!(due([458_752; 40].into_iter(), |_| None), Some(9));
    }

    #[test]
    fn rounds_that_shrink_are_not_noticed() {
        let shrinking = (1..100).map(|number| (1e9 * 0.89_f64.powi(number)) as u64);
        assert_eq!(due(shrinking, |_| None), None);
    }

    #[test]
    fn throttle_that_rises_gets_its_time() {
        assert_eq!(due([458_752; 40].into_iter(), |number| Some(number.min(20))), Some(26));
    }

    #[test]
    fn short_rounds_are_judged_by_the_most_bytes_that_any_of_them_left() {
        let mut convergence = Convergence::default();
        // Samples at the end of a round see few remaining bytes.
        let left = |number: u64| if number.is_multiple_of(5) { 80_000 - 70 * number } else { 458_752 };
        let due = (1..100u64).find(|number| {
            convergence.stands_still(Duration::from_millis(100 * number), &round(*number, left(*number)))
        });
        assert_eq!(due, Some(72));
    }

    fn settings(capabilities: &[&str], parameters: Value) -> Settings {
        let list = capabilities.iter().map(|name| json!({"capability": name, "state": true})).collect();
        Settings::from_answers(&list, parameters)
    }

    #[test]
    fn sentence_has_the_rates_and_only_remedies_that_are_left() {
        let slow = json!({"downtime-limit": 100, "max-bandwidth": 400_000, "max-cpu-throttle": 99});
        let text = sentence(&settings(&[], slow.clone()), &round(9, 458_752), 1.147).unwrap();
        for words in [
            "does not converge",
            "0.9 MB/s",
            "0.4 MB/s",
            "1147 ms",
            "100 ms",
            "max-bandwidth",
            "auto-converge",
        ] {
            assert!(text.contains(words), "{words} in {text}");
        }
        let free = json!({"downtime-limit": 100, "max-bandwidth": 0, "max-cpu-throttle": 99});
        let text =
            sentence(&settings(&["multifd", "dirty-limit", "postcopy-ram"], free), &round(9, 458_752), 1.147);
        let text = text.unwrap();
        for words in ["max-bandwidth", "multifd", "auto-converge", "postcopy"] {
            assert!(!text.contains(words), "{words} in {text}");
        }
        let throttled = |percent| Progress { throttle_percent: Some(percent), ..round(9, 458_752) };
        assert_eq!(sentence(&settings(&["auto-converge"], slow.clone()), &throttled(60), 1.147), None);
        assert!(sentence(&settings(&["auto-converge"], slow), &throttled(99), 1.147).is_some());
        let patient = json!({"downtime-limit": 2000, "max-bandwidth": 0});
        assert_eq!(sentence(&settings(&[], patient), &round(9, 458_752), 1.147), None);
    }
}
