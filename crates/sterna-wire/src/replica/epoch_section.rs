//! The section with an epoch's changes of a device stream (`specs/replica.md §5`).

/// A section of a checkpoint that continues a device stream. Its body is framed by its length.
#[derive(Debug, Clone, Copy)]
pub struct EpochSection;

impl EpochSection {
    /// Version of the section's body.
    pub const VERSION: u32 = 1;
    /// Most bytes of all such sections in one checkpoint.
    pub const MOST_BYTES: usize = 160 << 20;

    const SUFFIX: &str = "/epoch";

    /// The section's name for the device `device`.
    pub fn name_of(device: &str) -> String {
        format!("{device}{}", Self::SUFFIX)
    }

    /// The device of the section `section`; `None` for another kind of section.
    pub fn device_of(section: &str) -> Option<&str> {
        section.strip_suffix(Self::SUFFIX)
    }
}
