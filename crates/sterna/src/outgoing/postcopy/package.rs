//! The data of the switch: pages to drop, and the package (specs/postcopy.md §2).

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SHIFT};
use sterna_wire::main::Command;
use sterna_wire::{extension, limits};

use crate::error::{MigrationError, SettingDifference};
use crate::postcopy::answers::{DEVICES_PING, LOADED_PING};

/// The number of ranges in one command.
const RANGES: usize = 12;

/// Extends the bits to whole pages of the host's memory.
///
/// Such a page is placed as a whole, so it must be sent as a whole.
pub(in crate::outgoing) fn round_up(ram: &GuestRam, unsent: &DirtyBitmaps) {
    for (block, bits) in ram.blocks().iter().zip(unsent.blocks()) {
        let unit = block.page_bytes() >> PAGE_SHIFT;
        let mut from = 0;
        while let Some(run) = bits.next_run(from, bits.pages(), u64::MAX) {
            let (first, end) = (run.first / unit * unit, run.end().next_multiple_of(unit).min(bits.pages()));
            bits.set_range(first, end - first);
            from = end;
        }
    }
}

/// The commands that name the pages to drop.
///
/// These are pages that did not arrive, or that have changed since.
pub(in crate::outgoing) fn discards(ram: &GuestRam, unsent: &DirtyBitmaps) -> Vec<Command> {
    let mut commands = Vec::new();
    for (block, bits) in ram.blocks().iter().zip(unsent.blocks()) {
        let mut ranges = Vec::new();
        let mut from = 0;
        while let Some(run) = bits.next_run(from, bits.pages(), u64::MAX) {
            ranges.push((run.first << PAGE_SHIFT, run.count << PAGE_SHIFT));
            from = run.end();
        }
        let commands_of = ranges.chunks(RANGES).map(|ranges| Command::PostcopyDiscard {
            block: block.name().to_owned(),
            ranges: ranges.to_vec(),
        });
        commands.extend(commands_of);
    }
    commands
}

/// The elements of a package: LISTEN, the devices' `sections`, and RUN for a QEMU.
///
/// A Sterna gets the question to prepare in place of RUN.
pub(in crate::outgoing) fn package(sections: &[u8], is_sterna: bool) -> Result<Vec<u8>, MigrationError> {
    let wire = || MigrationError::wire("package");
    let mut bytes = Vec::with_capacity(sections.len() + 64);
    Command::PostcopyListen.encode(&mut bytes).map_err(wire())?;
    bytes.extend_from_slice(sections);
    let end = match is_sterna {
        true => vec![Command::Ping(extension::PREPARE_PING)],
        false => vec![Command::Ping(DEVICES_PING), Command::Ping(LOADED_PING), Command::PostcopyRun],
    };
    end.iter().try_for_each(|command| command.encode(&mut bytes)).map_err(wire())?;
    if bytes.len() as u64 > u64::from(limits::PACKAGE_BYTES) {
        let (most, length) = (limits::PACKAGE_BYTES, bytes.len());
        return Err(SettingDifference::PackageTooLong { bytes: length, most }.into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use sterna_ram::RamBlock;

    use super::*;

    #[test]
    fn every_unsent_page_is_dropped_once_in_ranges_of_twelve() {
        let ram = GuestRam::new(vec![RamBlock::without_memory("m0", 64 << PAGE_SHIFT).unwrap()]).unwrap();
        let unsent = DirtyBitmaps::new(&ram);
        for page in (0..40).step_by(2) {
            unsent.block(0).set(page);
        }
        unsent.block(0).set_range(50, 10);

        let commands = discards(&ram, &unsent);

        let named: Vec<_> = commands
            .iter()
            .map(|command| match command {
                Command::PostcopyDiscard { block, ranges } if block == "m0" => ranges.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(named.iter().map(Vec::len).collect::<Vec<_>>(), [12, 9]);
        assert_eq!(named[1][8], (50 << PAGE_SHIFT, 10 << PAGE_SHIFT));
        assert_eq!(discards(&ram, &DirtyBitmaps::new(&ram)), []);
    }

    #[test]
    fn package_for_a_qemu_is_the_observed_one_and_a_sterna_prepares_instead() {
        let qemu = package(b"\x04devices", false).unwrap();
        let wanted =
            b"\x08\0\x04\0\0\x04devices\x08\0\x02\0\x04\0\0\0\x03\x08\0\x02\0\x04\0\0\0\x42\x08\0\x05\0\0";
        assert_eq!(qemu, wanted);
        let sterna = package(b"\x04devices", true).unwrap();
        assert_eq!(sterna, b"\x08\0\x04\0\0\x04devices\x08\0\x02\0\x04\x53\x54\x4e\x03");
    }
}
