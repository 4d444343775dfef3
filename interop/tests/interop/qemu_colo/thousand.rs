//! A thousand checkpoints, during which no resource of the standby may grow.

use std::path::Path;

use sterna_interop::{Failure, Guest, Qemu, Root};

use super::{Command, PLAIN, Way, json};

/// Resources of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Takes {
    resident_kib: u64,
    descriptors: usize,
    threads: usize,
}

impl Takes {
    fn of(process: u32) -> Result<Self, Failure> {
        let place = Path::new("/proc").join(process.to_string());
        let failed = |error: std::io::Error| error.to_string();
        let count = |what: &str| std::fs::read_dir(place.join(what)).map(Iterator::count).map_err(failed);
        let status = std::fs::read_to_string(place.join("status")).map_err(failed)?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|line| line.split_whitespace().next()?.parse().ok());
        let resident_kib = resident.ok_or("no VmRSS")?;
        Ok(Self { resident_kib, descriptors: count("fd")?, threads: count("task")? })
    }
}

fn until(command: &mut Command, checkpoints: u64) -> Result<(), Failure> {
    loop {
        let said = command.next()?;
        match said["state"].as_str() {
            Some("waiting" | "seeding" | "following") => {}
            state => return Err(format!("{state:?}: {said}")),
        }
        if said["checkpoints"].as_u64() >= Some(checkpoints) {
            return Ok(());
        }
    }
}

#[test]
fn thousand_checkpoints_take_no_more_than_two_hundred() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("thousand_checkpoints_take_no_more_than_two_hundred") else {
        return Ok(());
    };
    let way = Way { channels: 2, ..PLAIN };
    let mut primary = Qemu::builder(&root)
        .memory_mib(32)
        .guest(Guest::Talker)
        .args(&["-netdev", "user,id=n0,restrict=on"])
        .spawn()?;
    let at = |what: &str| primary.directory().join(what).display().to_string();
    let (listen, image) = (format!("listen:unix:{}", at("standby")), at("image"));
    let arguments = [&listen, "--image", &image, "--json", "--channels=2"];
    let mut command = Command::start(&arguments)?;
    let first = command.next()?;
    let to = first["address"].as_str().ok_or_else(|| format!("no address in {first}"))?;
    way.set(&mut primary)?;
    primary.parameters(json!({"x-checkpoint-delay": 10}))?;
    primary.start_migration(to)?;
    until(&mut command, 200)?;
    let before = Takes::of(command.process.id())?;

    until(&mut command, 1000)?;

    let after = Takes::of(command.process.id())?;
    assert_eq!((after.descriptors, after.threads), (before.descriptors, before.threads));
    // The size of a checkpoint varies, and with it the buffers.
    let grown = after.resident_kib.saturating_sub(before.resident_kib);
    assert!(grown < 4 << 10, "{before:?}, {after:?}");
    primary.unfailed_migration()?;
    Ok(())
}
