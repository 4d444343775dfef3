//! Counts mapped memory, from `/proc/self/maps`.

use std::fmt;

/// Alignment and size of the C library's heaps, except the first: `HEAP_MAX_SIZE`.
const HEAP_BYTES: u64 = 64 << 20;
/// Size of the guard page below a thread's stack.
const GUARD_BYTES: u64 = 4096;

/// Mappings that can be read or written. Not counted: the C library's heaps, the stacks of threads, and
/// programs' files that are only read. The first backtrace maps those files again and keeps them.
///
/// The C library keeps free heaps and stacks: heaps for as many threads as have allocated in parallel, and 40
/// MiB of stacks. Their number therefore does not show a leak. A leaked thread is counted among threads, and
/// leaked heap memory is resident.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mappings {
    /// Number of mappings.
    pub count: usize,
    /// Total length in bytes. It is counted because the kernel merges neighbours into one mapping.
    pub bytes: u64,
}

impl Mappings {
    /// More than a process can have.
    pub(crate) const ANY: Self = Self { count: usize::MAX, bytes: u64::MAX };

    /// Counts the mappings of this process now.
    pub fn now() -> Self {
        Self::of(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default())
    }

    /// Whether neither number nor length has grown since `before`.
    pub(crate) fn is_within(&self, before: &Self) -> bool {
        self.count <= before.count && self.bytes <= before.bytes
    }

    fn of(maps: &str) -> Self {
        let lines: Vec<Line<'_>> = maps.lines().filter_map(Line::parse).collect();
        let mut found = Self::default();
        for (index, line) in lines.iter().enumerate() {
            let before = index.checked_sub(1).and_then(|index| lines.get(index));
            let is_kept = line.is_heap(lines.get(index + 1)) || line.is_stack(before) || line.is_text;
            if line.is_accessible && !is_kept {
                found.count += 1;
                found.bytes += line.end - line.start;
            }
        }
        found
    }
}

impl fmt::Display for Mappings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mappings of {} KiB", self.count, self.bytes >> 10)
    }
}

/// A line of `/proc/self/maps`.
struct Line<'a> {
    start: u64,
    end: u64,
    is_accessible: bool,
    /// A private mapping of a file that is only readable.
    is_text: bool,
    /// Name of the mapping. Empty if it is anonymous.
    name: &'a str,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let permissions = words.next()?;
        let name = words.nth(3).unwrap_or_default().trim();
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            is_accessible: permissions.contains(['r', 'w']),
            is_text: matches!(permissions, "r--p" | "r-xp") && name.starts_with('/'),
            name,
        })
    }

    /// The first heap's name is `[heap]`. The others start at multiples of their size, and their unused rest
    /// follows.
    fn is_heap(&self, next: Option<&Self>) -> bool {
        let is_other = self.name.is_empty() && self.start.is_multiple_of(HEAP_BYTES);
        let has_rest = next.is_some_and(|next| {
            !next.is_accessible && next.start == self.end && next.end.is_multiple_of(HEAP_BYTES)
        });
        self.name == "[heap]" || (is_other && (has_rest || self.end - self.start == HEAP_BYTES))
    }

    fn is_stack(&self, before: Option<&Self>) -> bool {
        let is_guard = |before: &Self| {
            let is_small = before.end - before.start == GUARD_BYTES;
            is_small && !before.is_accessible && before.name.is_empty() && before.end == self.start
        };
        self.name == "[stack]" || (self.name.is_empty() && before.is_some_and(is_guard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c0a00000-55d0c0a10000 r-xp 00000000 08:01 42                         /work/soak
55d0c1000000-55d0c1021000 rw-p 00000000 00:00 0                          [heap]
7f1000000000-7f1000100000 rw-p 00000000 00:00 0 
7f1000100000-7f1004000000 ---p 00000000 00:00 0 
7f1010000000-7f1010001000 ---p 00000000 00:00 0 
7f1010001000-7f1010201000 rw-p 00000000 00:00 0 
7f1020000000-7f1020600000 rw-s 00000000 00:01 77                         /memfd:ram.low (deleted)
7f1030000000-7f1030200000 rw-p 00000000 00:00 0 
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
";

    #[test]
    fn heaps_stacks_guards_and_programs_are_left_out() {
        // A file of memory, and anonymous memory at a heap's boundary without a heap's unused rest after it.
        let bytes = (6 << 20) + (2 << 20);
        assert_eq!(Mappings::of(MAPS), Mappings { count: 2, bytes });
    }

    #[test]
    fn what_joins_a_neighbour_is_more_bytes() {
        let longer = MAPS.replace("7f1020600000", "7f1020700000");
        let (before, now) = (Mappings::of(MAPS), Mappings::of(&longer));
        assert_eq!(now.count, before.count);
        assert!(!now.is_within(&before) && before.is_within(&now));
    }
}
