//! Protocol variants that depend on the version in a QEMU machine type's name (specs/stream.md §4).

/// Whether only the destination counts acknowledgements of the switchover: machine types up to 11.0.
/// A name without a version (Sterna's own machine type) uses the present form.
pub(crate) fn acknowledges_in_old_form(machine_type: &str) -> bool {
    version(machine_type).is_some_and(|version| version <= (11, 0))
}

/// Whether the end of each section is an implicit flush of multifd channels: machine types up to 8.0.
pub fn flushes_silently(machine_type: &str) -> bool {
    version(machine_type).is_some_and(|version| version <= (8, 0))
}

/// Version of a machine type: the last two numbers of a name such as `pc-i440fx-11.1`.
fn version(machine_type: &str) -> Option<(u32, u32)> {
    let (_, version) = machine_type.rsplit_once('-')?;
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_qemu_machine_types_is_read() {
        assert!(acknowledges_in_old_form("pc-i440fx-11.0"));
        assert!(acknowledges_in_old_form("pc-q35-9.2"));
        assert!(!acknowledges_in_old_form("pc-i440fx-11.1"));
        assert!(flushes_silently("pc-q35-8.0"));
        assert!(!flushes_silently("pc-q35-8.1"));
    }

    #[test]
    fn name_without_version_speaks_the_present_form() {
        for name in ["sterna-1", "none", "microvm", "pc", ""] {
            assert!(!acknowledges_in_old_form(name), "{name}");
            assert!(!flushes_silently(name), "{name}");
        }
    }
}
