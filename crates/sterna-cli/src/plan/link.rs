//! The bandwidth of this host's link, for a forecast whose VM has no limit.

use std::path::Path;

/// Bandwidth if no interface states one: 10 Gbit/s, in bytes per second.
const ASSUMED: u64 = 1_250_000_000;
/// Bytes per second of 1 Mbit/s.
const MEGABIT: u64 = 125_000;

/// The bandwidth of the fastest network interface of this host, in bytes per second, and its origin as a clause.
pub fn of_this_host() -> (u64, String) {
    of(Path::new("/sys/class/net"))
}

fn of(interfaces: &Path) -> (u64, String) {
    let entries = std::fs::read_dir(interfaces).into_iter().flatten().flatten();
    let fastest = entries.filter_map(|entry| Some((speed(&entry.path())?, entry.file_name()))).max();
    match fastest {
        Some((megabits, name)) => {
            (megabits * MEGABIT, format!("{megabits} Mbit/s, the speed of {}", name.display()))
        }
        None => (ASSUMED, "10 Gbit/s, because no network interface of this host states its speed".to_owned()),
    }
}

/// Speed of a device's interface that is up, in Mbit/s.
fn speed(interface: &Path) -> Option<u64> {
    // Bridges and tunnels have no device, and state speeds that no wire has.
    let is_device = interface.join("device").exists();
    let read = |name: &str| std::fs::read_to_string(interface.join(name)).ok();
    let is_up = read("operstate")?.trim() == "up";
    // The kernel states -1 if the speed is unknown.
    read("speed")?.trim().parse().ok().filter(|speed| is_device && is_up && *speed > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fastest_interface_that_is_up_counts() {
        let directory = tempfile::tempdir().unwrap();
        let put = |name: &str, state: &str, speed: &str, is_device: bool| {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.join(if is_device { "device" } else { "bridge" })).unwrap();
            std::fs::write(path.join("operstate"), state).unwrap();
            std::fs::write(path.join("speed"), speed).unwrap();
        };
        assert_eq!(of(directory.path()).0, ASSUMED);
        put("eno1", "up\n", "1000\n", true);
        put("eno2", "down\n", "25000\n", true);
        put("eno3", "up\n", "-1\n", true);
        put("br0", "up\n", "100000\n", false);

        assert_eq!(of(directory.path()), (125_000_000, "1000 Mbit/s, the speed of eno1".to_owned()));
    }
}
