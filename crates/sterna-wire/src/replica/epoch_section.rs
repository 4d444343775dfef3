//! What changed in a device's stream in an epoch (`specs/replica.md §5`).

/// The section of a checkpoint that goes on with a device's stream. Its body is framed by its length.
#[derive(Debug, Clone, Copy)]
pub struct EpochSection;

impl EpochSection {
    /// Version of its body.
    pub const VERSION: u32 = 1;
    /// The most bytes that all of them have in one checkpoint.
    pub const MOST_BYTES: usize = 160 << 20;

    const SUFFIX: &str = "/epoch";

    /// The section's name, for the device of that name.
    pub fn name_of(device: &str) -> String {
        format!("{device}{}", Self::SUFFIX)
    }

    /// The device that a section of that name is for; none if it is another section.
    pub fn device_of(section: &str) -> Option<&str> {
        section.strip_suffix(Self::SUFFIX)
    }
}
