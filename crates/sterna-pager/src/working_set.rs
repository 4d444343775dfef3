//! The pages that guests touch first, and the file that keeps them (specs/uffd.md §5).

use std::fmt::Write;

use parking_lot::Mutex;
use sterna_ram::PageBitmap;

/// Bytes of the smallest page.
const PAGE_BYTES: u64 = 4096;
/// First line of a file.
const HEAD: &str = "sterna-working-set 1";
/// Largest file in bytes.
const LONGEST: usize = 64 << 20;

/// Pages in the order in which guests touched them first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkingSet {
    /// Bytes of the memory that the offsets are in.
    pub memory_bytes: u64,
    /// Offset and length of each run of touched pages, in bytes.
    pub runs: Vec<(u64, u64)>,
}

/// A file is no working set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}; record the working set again with `sterna serve --record`")]
pub struct WorkingSetError {
    /// Number of the line, from 1.
    pub line: usize,
    /// The broken rule.
    pub why: String,
}

impl WorkingSet {
    /// Decodes the text of a file.
    ///
    /// # Errors
    /// [`WorkingSetError`] with the first line that breaks a rule.
    pub fn decode(text: &str) -> Result<Self, WorkingSetError> {
        let error = |line: usize, why: String| WorkingSetError { line, why };
        if text.len() > LONGEST {
            return Err(error(
                1,
                format!("the file has {} bytes, but at most {LONGEST} are read", text.len()),
            ));
        }
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        let head = lines.next().map_or("", |(_, line)| line);
        if head != HEAD {
            return Err(error(1, format!("it begins with {head:?} instead of {HEAD:?}")));
        }
        let memory = lines.next().and_then(|(_, line)| line.strip_prefix("memory ")?.parse::<u64>().ok());
        let Some(memory_bytes) = memory else {
            return Err(error(2, "`memory BYTES` is missing".to_owned()));
        };
        let mut runs = Vec::new();
        for (number, line) in lines {
            let run = line
                .split_once(' ')
                .and_then(|(offset, bytes)| Some((offset.parse::<u64>().ok()?, bytes.parse::<u64>().ok()?)));
            let Some((offset, bytes)) = run else {
                return Err(error(number, format!("{line:?} is no offset and length")));
            };
            let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= memory_bytes);
            let is_whole = bytes > 0 && offset.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES);
            if !is_inside || !is_whole {
                let rule = format!("{line:?} are no whole pages of {memory_bytes} bytes of memory");
                return Err(error(number, rule));
            }
            runs.push((offset, bytes));
        }
        Ok(Self { memory_bytes, runs })
    }

    /// The text of the file.
    pub fn encode(&self) -> String {
        let mut text = format!("{HEAD}\nmemory {}\n", self.memory_bytes);
        for (offset, bytes) in &self.runs {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{offset} {bytes}");
        }
        text
    }

    /// Number of bytes in all runs.
    pub fn len_bytes(&self) -> u64 {
        self.runs.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The frames that contain the runs, in their order and without repetitions.
    pub(crate) fn frames(&self, frame_bytes: u64) -> Vec<u64> {
        let seen = PageBitmap::new(self.memory_bytes.div_ceil(frame_bytes));
        let mut frames = Vec::new();
        for (offset, bytes) in &self.runs {
            for frame in offset / frame_bytes..(offset + bytes).div_ceil(frame_bytes) {
                if !seen.set(frame) {
                    frames.push(frame * frame_bytes);
                }
            }
        }
        frames
    }
}

/// Collects the pages that any guest touches.
pub(crate) struct Recorder {
    memory_bytes: u64,
    seen: PageBitmap,
    runs: Mutex<Vec<(u64, u64)>>,
}

impl Recorder {
    pub(crate) fn new(memory_bytes: u64) -> Self {
        let seen = PageBitmap::new(memory_bytes / PAGE_BYTES);
        Self { memory_bytes, seen, runs: Mutex::default() }
    }

    pub(crate) fn note(&self, offset: u64, bytes: u64) {
        if self.seen.set(offset / PAGE_BYTES) {
            return;
        }
        let mut runs = self.runs.lock();
        match runs.last_mut() {
            Some((first, length)) if *first + *length == offset => *length += bytes,
            _ => runs.push((offset, bytes)),
        }
    }

    pub(crate) fn recorded(&self) -> WorkingSet {
        WorkingSet { memory_bytes: self.memory_bytes, runs: self.runs.lock().clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_recorded_once_and_in_their_order() {
        let recorder = Recorder::new(1 << 20);
        for page in [5, 6, 7, 1, 6, 8] {
            recorder.note(page * PAGE_BYTES, PAGE_BYTES);
        }

        let set = recorder.recorded();

        assert_eq!(set.runs, [(5 * 4096, 3 * 4096), (4096, 4096), (8 * 4096, 4096)]);
        assert_eq!(WorkingSet::decode(&set.encode()), Ok(set.clone()));
        assert_eq!(set.frames(16384), [16384, 0, 32768]);
        assert_eq!(set.len_bytes(), 5 * 4096);
    }

    #[test]
    fn line_that_breaks_a_rule_is_named() {
        let line = |text: &str| WorkingSet::decode(text).unwrap_err().line;
        assert_eq!(line("QEVM"), 1);
        assert_eq!(line("sterna-working-set 1\n0 4096\n"), 2);
        for wrong in ["x", "0 0", "1 4096", "0 1", "4096 4096", "18446744073709547520 8192"] {
            assert_eq!(line(&format!("sterna-working-set 1\nmemory 4096\n0 4096\n{wrong}\n")), 4, "{wrong}");
        }
    }
}
