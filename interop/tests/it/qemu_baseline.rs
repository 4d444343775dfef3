//! The judge judged: QEMU to QEMU, without Sterna, so that a failure elsewhere is Sterna's.
#![allow(missing_docs)]

use sterna_interop::{Accelerator, Builder, Failure, Guest, Qemu, Root, kvm_for, unbroken};

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
fn boot_guest_whose_image_was_changed_says_so() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("boot_guest_whose_image_was_changed_says_so") else { return Ok(()) };
    let builder = Qemu::builder(&root).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(3)?;
    let image = source.directory().join("image");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;

    // RAM's pages lie at their own addresses behind a first offset, aligned to 1 MiB.
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
