//! The guest's console output, and its checks.
#![allow(clippy::print_stdout)]

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_vmm::KvmMachine;

use super::guest;
use super::machine::Setup;
use crate::Failure;
use crate::scenarios::ensure;

/// Time limit of every wait for the guest.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// The guest's output from all machines in which it ran.
#[derive(Clone, Default)]
pub(super) struct Console(Arc<Mutex<Said>>);

#[derive(Default)]
struct Said {
    bytes: Vec<u8>,
    /// Lengths of the output, and when each was reached, by this host's clock.
    arrivals: Vec<(usize, Instant)>,
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut said = self.0.lock();
        said.bytes.extend_from_slice(bytes);
        // Output arrives byte by byte, but only the times of lines are needed.
        if bytes.contains(&b'\n') {
            let length = said.bytes.len();
            said.arrivals.push((length, Instant::now()));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Console {
    /// A console with the output of another machine's guest.
    pub(super) fn of_bytes(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Said { bytes, arrivals: Vec::new() })))
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().bytes).into_owned()
    }

    /// The rest of each line that begins with this word.
    pub(super) fn lines(&self, word: &str) -> Vec<String> {
        let text = self.text();
        let lines = text.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
        lines.map(str::to_owned).collect()
    }

    /// The numbers in each line that begins with this word.
    pub(super) fn of(&self, word: &str) -> Vec<Vec<u64>> {
        let numbers =
            |line: &String| line.split(' ').filter_map(|number| number.trim().parse().ok()).collect();
        self.lines(word).iter().map(numbers).collect()
    }

    pub(super) fn last(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().rev().take(12).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }

    /// Number of the last tick; 0 before the first.
    pub(super) fn ticks(&self) -> u64 {
        let said = self.0.lock();
        let mut lines = said.bytes.rsplit(|byte| *byte == b'\n');
        // The last line may be incomplete.
        lines.next();
        let number = |line: &[u8]| {
            let words = line.strip_prefix(guest::TICK.as_bytes())?.strip_prefix(b" ")?;
            std::str::from_utf8(words).ok()?.split(' ').next()?.parse().ok()
        };
        lines.find_map(number).unwrap_or(0)
    }

    /// Times at which the lines with this first word were complete, by this host's clock. Empty if the output
    /// was not read live.
    fn arrivals(&self, word: &str) -> Vec<Instant> {
        let said = self.0.lock();
        let (mut end, mut arrivals, mut found) = (0, said.arrivals.iter(), Vec::new());
        let mut latest = arrivals.next();
        for line in said.bytes.split_inclusive(|byte| *byte == b'\n') {
            end += line.len();
            while latest.is_some_and(|(length, _)| *length < end) {
                latest = arrivals.next();
            }
            if line.strip_prefix(word.as_bytes()).is_some_and(|rest| rest.starts_with(b" ")) {
                found.extend(latest.map(|(_, at)| *at));
            }
        }
        found
    }

    pub(super) fn wait_for_tick(&self, machine: &KvmMachine, tick: u64) -> Result<(), Failure> {
        self.wait_until(machine, || self.ticks() >= tick, &format!("tick {tick}"))
    }

    pub(super) fn wait_for(&self, machine: &KvmMachine, text: &str) -> Result<(), Failure> {
        self.wait_until(machine, || self.text().contains(text), text)
    }

    fn wait_until(&self, machine: &KvmMachine, is_so: impl Fn() -> bool, what: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        while !is_so() {
            if let Some(reason) = machine.ended() {
                return Err(format!("{reason}; it said last: {}", self.last()));
            }
            ensure(begin.elapsed() < PATIENCE, || format!("no `{what}`; it said last: {}", self.last()))?;
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Checks the guest's output. It must have the expected number of ticks. Its clocks must never go back,
    /// and may advance by at most `longest_gap` more than this host's time. Its kernel must have no
    /// complaint. Returns the number of ticks.
    pub(super) fn check(
        &self,
        setup: &Setup,
        ticks: Option<u64>,
        longest_gap: Duration,
    ) -> Result<u64, Failure> {
        let of = |word: &str| self.of(word);
        ensure(of(guest::CPUS) == [[u64::from(setup.vcpus.max(1))]], || {
            format!("CPUs: {:?}", of(guest::CPUS))
        })?;
        let seen = of(guest::TICK);
        ensure(seen.len() as u64 == ticks.unwrap_or(self.ticks()), || {
            format!("{} ticks; it said last: {}", seen.len(), self.last())
        })?;
        let arrivals = self.arrivals(guest::TICK);
        for (number, pair) in (1..).zip(seen.windows(2)) {
            // On a busy host a tick takes longer, and the clocks of guest and host both show it.
            let passed = match arrivals.get(number as usize - 1..=number as usize) {
                Some([before, after]) => *after - *before,
                _ => Duration::ZERO,
            };
            let [[before, realtime, monotonic], [after, later_realtime, later_monotonic]] =
                [&pair[0][..], &pair[1][..]]
            else {
                let lines = self.lines(guest::TICK);
                return Err(format!("{:?} are no ticks", lines.get(number as usize - 1..=number as usize)));
            };
            ensure(*before == number && *after == number + 1, || {
                format!("tick {after} comes after {before}")
            })?;
            for (clock, before, after) in
                [("real time", realtime, later_realtime), ("monotonic time", monotonic, later_monotonic)]
            {
                let gap = after.checked_sub(*before).map(Duration::from_millis);
                ensure(gap.is_some_and(|gap| gap < passed + longest_gap), || {
                    let slow = self.lines(guest::SLOW);
                    format!(
                        "{clock} went from {before} to {after} ms at tick {number}, and {passed:?} passed here; slow steps: {slow:?}"
                    )
                })?;
            }
        }
        ensure(of(guest::WRONG) == [[0]], || format!("wrong words of memory: {:?}", of(guest::WRONG)))?;
        let is_one = |word: &str, is_there: bool, value: u64| {
            let (found, wanted) = (of(word), if is_there { vec![vec![value]] } else { Vec::new() });
            ensure(found == wanted, || format!("{word}: {found:?}, not {wanted:?}"))
        };
        is_one(guest::BLOCKS, setup.disk.is_some(), 0)?;
        is_one(guest::FILES, setup.has_root, 0)?;
        is_one(guest::SHARED, setup.has_processes, 0)?;
        is_one(guest::RANDOM, setup.has_root || setup.disk.is_some(), guest::RANDOM_BYTES as u64)?;
        let is_of_clocks = |line: &String| guest::OF_CLOCKS.iter().any(|sign| line.contains(sign));
        let (of_clocks, others): (Vec<_>, Vec<_>) =
            self.lines(guest::COMPLAINT).into_iter().partition(is_of_clocks);
        // Half a millisecond causes such a complaint, and on a busy host the lab's only core is unavailable
        // for longer.
        of_clocks.iter().for_each(|line| println!("LAB remark: {line}"));
        ensure(others.is_empty(), || format!("{others:?}"))?;
        Ok(seen.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Writes two ticks that are `apart` for the guest. Their time on this host does not matter.
    fn ticks(apart: Duration, console: &mut Console) {
        let after = 1000 + apart.as_millis();
        let text = format!("{0} 1 1000 1000\nother\n{0} 2 {after} {after}\n", guest::TICK);
        // The output arrives in two pieces that end within lines.
        let (first, second) = text.split_at(text.len() - 3);
        console.write_all(first.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        console.write_all(second.as_bytes()).unwrap();
    }

    fn clocks(console: &Console, longest_gap: Duration) -> Result<u64, Failure> {
        let text = format!("{} 1\n{} 0\n", guest::CPUS, guest::WRONG);
        console.clone().write_all(text.as_bytes()).unwrap();
        console.check(&Setup::default(), None, longest_gap)
    }

    #[test]
    fn clock_may_go_on_by_what_passed_here_and_no_further() {
        let mut console = Console::default();
        ticks(30 * SECOND, &mut console);
        let arrivals = console.arrivals(guest::TICK);
        assert!(arrivals[1] - arrivals[0] >= Duration::from_millis(5), "each line has its own");
        let why = clocks(&console, 20 * SECOND).unwrap_err();
        assert!(why.contains("real time went from 1000 to 31000 ms"), "{why}");

        let mut slow = Console::default();
        ticks(30 * SECOND, &mut slow);
        slow.0.lock().arrivals[0].1 -= 15 * SECOND;
        assert_eq!(clocks(&slow, 20 * SECOND), Ok(2));
    }

    #[test]
    fn clock_of_a_guest_that_nobody_heard_may_not_jump() {
        let mut heard = Console::default();
        ticks(30 * SECOND, &mut heard);
        let console = Console::of_bytes(heard.text().into_bytes());
        assert!(console.arrivals(guest::TICK).is_empty());
        assert!(clocks(&console, 20 * SECOND).is_err());
    }
}
