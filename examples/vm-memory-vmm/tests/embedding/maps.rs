//! The mappings of a process: `/proc/PID/maps`.

use crate::vmm::Vmm;

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapping {
    /// Addresses, permissions, offset in the file, device, inode: the whole line.
    line: String,
    bytes: u64,
    is_guest_memory: bool,
    is_accessible: bool,
}

#[derive(Debug)]
pub struct Maps(Vec<Mapping>);

impl Maps {
    pub fn of(vmm: &Vmm) -> Self {
        let text = std::fs::read_to_string(format!("/proc/{}/maps", vmm.id())).unwrap();
        Self(text.lines().map(Mapping::parse).collect())
    }

    /// Checks that guest memory has the same mappings of the same file.
    ///
    /// Also checks that no mapping of that size was added.
    #[track_caller]
    pub fn assert_guest_memory_is_untouched_in(&self, after: &Self) {
        let before: Vec<_> = self.guest_memory().collect();
        assert_eq!(before.len(), 2, "two regions: {self:#?}");
        assert!(after.guest_memory().eq(before), "{self:#?} became {after:#?}");
        self.assert_guest_memory_is_the_only_large_one();
        after.assert_guest_memory_is_the_only_large_one();
    }

    /// Checks that all other memory of the process is too small for a copy.
    #[track_caller]
    pub fn assert_guest_memory_is_the_only_large_one(&self) {
        let guest: u64 = self.guest_memory().map(|mapping| mapping.bytes).sum();
        let other = self.0.iter().filter(|mapping| !mapping.is_guest_memory && mapping.is_accessible);
        let other: u64 = other.map(|mapping| mapping.bytes).sum();
        assert!(guest == 64 << 20 && other < guest, "{guest} and {other}: {self:#?}");
    }

    fn guest_memory(&self) -> impl Iterator<Item = &Mapping> {
        self.0.iter().filter(|mapping| mapping.is_guest_memory)
    }
}

impl Mapping {
    fn parse(line: &str) -> Self {
        let (addresses, rest) = line.split_once(' ').unwrap();
        let (first, end) = addresses.split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        Self {
            line: line.to_owned(),
            bytes: number(end) - number(first),
            is_guest_memory: line.contains("/memfd:guest-memory"),
            is_accessible: !rest.starts_with("---"),
        }
    }
}
