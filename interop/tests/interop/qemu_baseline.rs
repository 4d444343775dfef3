//! Controls from QEMU to QEMU, without Sterna. If they pass, a failure in another test is Sterna's.
#![allow(missing_docs)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use sterna_interop::qemu::PATIENCE;
use sterna_interop::{
    Accelerator, Builder, Failure, GAPS, GAPS_ADDRESS, Guest, LONGEST_GAP_ADDRESS, PACE_ADDRESS, Qemu, Ram,
    Root, SAYS_ADDRESS, gap_ticks, kvm_for, unbroken,
};

#[test]
fn boot_guest_saved_as_legacy_stream_by_qemu_counts_on() -> Result<(), Failure> {
    let test = "boot_guest_saved_as_legacy_stream_by_qemu_counts_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };

    saved_and_restored(Qemu::builder(&root).guest(Guest::Boot), &[])
}

#[test]
fn boot_guest_on_kvm_saved_and_restored_by_qemu_counts_on() -> Result<(), Failure> {
    let test = "boot_guest_on_kvm_saved_and_restored_by_qemu_counts_on";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };

    saved_and_restored(Qemu::builder(&root).accelerator(Accelerator::Kvm).guest(Guest::Boot), &["mapped-ram"])
}

#[test]
fn linux_guest_saved_and_restored_by_qemu_counts_on() -> Result<(), Failure> {
    let test = "linux_guest_saved_and_restored_by_qemu_counts_on";
    let Some(root) = Root::qemu_for(test).filter(|root| Guest::Linux.available_for(root, test)) else {
        return Ok(());
    };

    saved_and_restored(Qemu::builder(&root).memory_mib(128).guest(Guest::Linux), &["mapped-ram", "multifd"])
}

#[test]
fn boot_guest_migrated_by_qemu_over_tcp_counts_on() -> Result<(), Failure> {
    let test = "boot_guest_migrated_by_qemu_over_tcp_counts_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = Qemu::builder(&root).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    let mut target = builder.incoming_defer().spawn()?;
    source.wait_for_ticks(3)?;

    let port = target.listen_on_tcp()?;
    source.migrate(&format!("tcp:127.0.0.1:{port}"))?;

    target.wait_for_ticks(3)?;
    unbroken(&[&source, &target])?;
    Ok(())
}

#[test]
fn boot_guest_counts_the_times_between_its_pages_and_says_dots() -> Result<(), Failure> {
    /// Pace of the guest in ticks of the time-stamp counter.
    const PACE: u32 = 1_000_000;
    let test = "boot_guest_counts_the_times_between_its_pages_and_says_dots";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut guest = Qemu::builder(&root).ram(Ram::File).guest(Guest::Boot).spawn()?;
    guest.wait_for_ticks(1)?;
    let text = |error: std::io::Error| error.to_string();
    let ram = OpenOptions::new().read(true).write(true).open(guest.directory().join("ram")).map_err(text)?;
    ram.write_all_at(&PACE.to_le_bytes(), PACE_ADDRESS).map_err(text)?;
    ram.write_all_at(&[0; GAPS * 4], GAPS_ADDRESS).map_err(text)?;
    ram.write_all_at(&[1], SAYS_ADDRESS).map_err(text)?;
    let word = |address: u64| -> Result<u32, Failure> {
        let mut bytes = [0; 4];
        ram.read_exact_at(&mut bytes, address).map_err(text)?;
        Ok(u32::from_le_bytes(bytes))
    };

    let begin = Instant::now();
    let gaps = loop {
        let gaps = (0..GAPS as u64).map(|index| word(GAPS_ADDRESS + index * 4));
        let gaps = gaps.collect::<Result<Vec<u32>, Failure>>()?;
        if gaps.iter().sum::<u32>() >= 200 {
            break gaps;
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("it counts nothing: {gaps:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    };

    let counted: Vec<usize> = (0..GAPS).filter(|index| gaps[*index] > 0).collect();
    let (first, last) = (counted[0], counted[counted.len() - 1]);
    assert!(gap_ticks(first + 1) > u64::from(PACE), "one is shorter than the pace: {gaps:?}");
    assert!(gap_ticks(last) <= u64::from(word(LONGEST_GAP_ADDRESS)?), "the longest is not counted: {gaps:?}");
    assert!(guest.serial().contains("......"));
    Ok(())
}

#[test]
fn boot_guest_whose_image_was_changed_says_so() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("boot_guest_whose_image_was_changed_says_so") else { return Ok(()) };
    let builder = Qemu::builder(&root).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(3)?;
    let image = source.directory().join("image");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;

    // RAM's pages are at their own addresses after a first offset, aligned to 1 MiB.
    let mut bytes = std::fs::read(&image).map_err(|error| error.to_string())?;
    bytes[(1 << 20) + (8 << 20)] ^= 1;
    std::fs::write(&image, bytes).map_err(|error| error.to_string())?;
    let mut target = builder.incoming_defer().spawn()?;
    target.capabilities(&["mapped-ram"])?;
    target.incoming(&format!("file:{}", image.display()))?;
    target.resume()?;

    let noticed = target.wait_for_ticks(3).expect_err("a changed page must be noticed");
    assert!(noticed.contains("BAD"), "{noticed}");
    Ok(())
}

fn saved_and_restored(builder: Builder, capabilities: &[&str]) -> Result<(), Failure> {
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(3)?;
    let uri = format!("file:{}", source.directory().join("image").display());
    source.capabilities(capabilities)?;
    source.migrate(&uri)?;
    assert_eq!(source.status()?, "postmigrate");

    let mut target = builder.incoming_defer().spawn()?;
    target.capabilities(capabilities)?;
    target.incoming(&uri)?;
    target.resume()?;

    target.wait_for_ticks(3)?;
    unbroken(&[&source, &target])?;
    Ok(())
}
