//! What the guest says, and what is to be seen in it.
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

/// How long the guest may take for anything.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// What the guest says, in whichever machine it is.
#[derive(Clone, Default)]
pub(super) struct Console(Arc<Mutex<Vec<u8>>>);

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Console {
    /// What another machine's guest has said.
    pub(super) fn of_bytes(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(bytes)))
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }

    /// What follows in each line that begins with this word.
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

    /// The number of the last tick; 0 before the first.
    pub(super) fn ticks(&self) -> u64 {
        let bytes = self.0.lock();
        let mut lines = bytes.rsplit(|byte| *byte == b'\n');
        // The last one may not be whole.
        lines.next();
        let number = |line: &[u8]| {
            let words = line.strip_prefix(guest::TICK.as_bytes())?.strip_prefix(b" ")?;
            std::str::from_utf8(words).ok()?.split(' ').next()?.parse().ok()
        };
        lines.find_map(number).unwrap_or(0)
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

    /// It has ticked so often, its clocks never went back or stood still for long, and its kernel has nothing to complain of. Gives
    /// how often it has ticked.
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
        for (number, pair) in (1..).zip(seen.windows(2)) {
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
                ensure(gap.is_some_and(|gap| gap < longest_gap), || {
                    let slow = self.lines(guest::SLOW);
                    format!("{clock} went from {before} to {after} ms at tick {number}; slow steps: {slow:?}")
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
        // Half a millisecond is enough for that, and on a busy host the lab's only core is taken away for longer.
        of_clocks.iter().for_each(|line| println!("LAB remark: {line}"));
        ensure(others.is_empty(), || format!("{others:?}"))?;
        Ok(seen.len() as u64)
    }
}
