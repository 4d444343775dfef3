//! Where the blocks of an image lie in the guest's physical memory.
//!
//! An image says how long the machine's RAM is, not where it lies: PC machines leave a hole for devices below
//! 4 GiB and put the rest of RAM behind it. How much lies below, firmware finds in the CMOS memory of the
//! real-time clock, and so does this: the clock's state is in the image, in the fields that its description
//! names. Without it the rule of the machine type decides, as seen on QEMU 11.1:
//!
//! | machine | RAM from | below 4 GiB then |
//! | --- | --- | --- |
//! | `pc-i440fx-*` | 3.5 GiB on | 3 GiB |
//! | `pc-q35-*` | 2.75 GiB on | 2 GiB |
//! | `microvm` | above 3 GiB | 3 GiB |
//!
//! The firmware (`pc.bios`) ends at 4 GiB. A virtio-mem device states its address in its early section.
//! Other processors' machines have their RAM in one piece ([`Architecture::ram_base`]). What has no known address (DIMMs,
//! the backends of several NUMA nodes, video memory, the RAM of a machine that is not known) is left out, and named.

use super::architecture::Architecture;

/// Start of RAM that does not fit below the hole.
const HIGH: u64 = 4 << 30;

/// A block, as far as a map needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapBlock {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub length_bytes: u64,
}

/// A stretch of physical addresses that one block fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Region {
    /// First guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Index of the block.
    pub block: usize,
    /// Where in the block it starts, in bytes.
    pub block_offset: u64,
}

/// The map, by rising address, without overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct MemoryMap {
    /// The stretches.
    pub regions: Vec<Region>,
    /// Indices of blocks whose address is not known.
    pub unplaced: Vec<usize>,
    /// The machine's RAM, if its address is not known: what lies elsewhere may be it.
    pub unplaced_main: Option<usize>,
    /// Where the machine's RAM begins, if only the machine type says so.
    pub assumed_base: Option<u64>,
    /// How much of the machine's RAM lies below 4 GiB, where that is known to come from.
    pub split: Option<Split>,
}

/// Where the machine's RAM is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Split {
    /// Bytes below 4 GiB.
    pub low_bytes: u64,
    /// Whether the guest's CMOS memory says so; else it is the machine type's rule.
    pub is_from_cmos: bool,
}

/// What is known about a machine.
#[derive(Debug, Clone, Default)]
pub struct MapHints<'a> {
    /// Its processors, if they are known; only those of x86 have the hole below 4 GiB. Where the RAM of others lies is
    /// not known.
    pub architecture: Option<Architecture>,
    /// Machine type, such as `pc-q35-11.1`.
    pub machine_type: &'a str,
    /// CMOS memory of the real-time clock.
    pub cmos: Option<&'a [u8]>,
    /// Blocks whose address is known for sure: by the user, or from their device's state.
    pub placed: Vec<(usize, u64)>,
}

impl MemoryMap {
    /// The map of a machine.
    pub fn of(blocks: &[MapBlock], hints: &MapHints<'_>) -> Self {
        let mut map = Self::default();
        for &(block, address) in &hints.placed {
            if let Some(MapBlock { length_bytes, .. }) = blocks.get(block) {
                map.place(Region { address, length_bytes: *length_bytes, block, block_offset: 0 });
            }
        }
        let is_placed = |block| hints.placed.iter().any(|placed| placed.0 == block);
        let is_pc = hints.architecture == Some(Architecture::X86);
        let main = main_block(blocks, hints).filter(|main| !is_placed(*main));
        let base = hints.architecture.and_then(|architecture| architecture.ram_base(hints.machine_type));
        if let Some((main, address)) = main.zip(base).filter(|_| !is_pc) {
            let length_bytes = blocks[main].length_bytes;
            map.place(Region { address, length_bytes, block: main, block_offset: 0 });
            map.assumed_base = map.regions.iter().find(|region| region.block == main).map(|it| it.address);
        }
        if let Some(main) = main.filter(|_| is_pc) {
            let length = blocks[main].length_bytes;
            let split = split(length, hints);
            map.split = Some(split);
            let low = split.low_bytes.min(length);
            map.place(Region { address: 0, length_bytes: low, block: main, block_offset: 0 });
            map.place(Region { address: HIGH, length_bytes: length - low, block: main, block_offset: low });
        }
        let bios = blocks.iter().position(|block| block.name == "pc.bios" && block.length_bytes <= HIGH);
        if let Some(bios) = bios.filter(|bios| is_pc && !is_placed(*bios)) {
            let length_bytes = blocks[bios].length_bytes;
            map.place(Region { address: HIGH - length_bytes, length_bytes, block: bios, block_offset: 0 });
        }
        map.regions.sort_by_key(|region| region.address);
        map.unplaced = (0..blocks.len())
            .filter(|block| map.regions.iter().all(|region| region.block != *block))
            .collect();
        map.unplaced_main = main.filter(|main| map.unplaced.contains(main));
        map
    }

    /// The stretch at `address`, cut to start there.
    pub fn at(&self, address: u64) -> Option<Region> {
        let index = self.regions.partition_point(|region| region.address <= address);
        let region = self.regions[..index].last()?;
        let inside = address - region.address;
        (inside < region.length_bytes).then(|| Region {
            address,
            length_bytes: region.length_bytes - inside,
            block: region.block,
            block_offset: region.block_offset + inside,
        })
    }

    /// Adds a stretch that overlaps none.
    fn place(&mut self, region: Region) {
        let end = region.address.checked_add(region.length_bytes);
        let is_free = end.is_some_and(|end| {
            self.regions
                .iter()
                .all(|other| end <= other.address || other.address + other.length_bytes <= region.address)
        });
        if region.length_bytes > 0 && is_free {
            self.regions.push(region);
        }
    }
}

/// The block that is the machine's RAM: by its usual name, else by the length that CMOS tells, else the longest
/// that belongs to no device.
fn main_block(blocks: &[MapBlock], hints: &MapHints<'_>) -> Option<usize> {
    let usual = [
        "pc.ram",
        "microvm.ram",
        "mach-virt.ram",
        "ppc_spapr.ram",
        "s390.ram",
        "riscv_virt_board.ram",
        "ram",
        "ram0",
    ];
    if let Some(found) = blocks.iter().position(|block| usual.contains(&block.name.as_str())) {
        return Some(found);
    }
    let own = |block: &MapBlock| !block.name.contains('/') && !matches!(&*block.name, "pc.bios" | "pc.rom");
    if let Some((low, high)) = hints.cmos.and_then(cmos_split) {
        return blocks.iter().position(|block| own(block) && block.length_bytes == low + high);
    }
    let mut backends: Vec<_> = (0..blocks.len()).filter(|index| own(&blocks[*index])).collect();
    backends.sort_by_key(|index| std::cmp::Reverse(blocks[*index].length_bytes));
    // Several may be NUMA nodes, whose order an image does not tell.
    (backends.len() == 1).then(|| backends[0])
}

fn split(length: u64, hints: &MapHints<'_>) -> Split {
    if let Some((low, high)) = hints.cmos.and_then(cmos_split)
        && low + high == length
    {
        return Split { low_bytes: low, is_from_cmos: true };
    }
    const GIB: u64 = 1 << 30;
    let machine = hints.machine_type;
    let low_bytes = if machine.starts_with("pc-q35") {
        if length >= 11 * GIB / 4 { 2 * GIB } else { length }
    } else if machine.starts_with("pc-i440fx") {
        if length >= 7 * GIB / 2 { 3 * GIB } else { length }
    } else if machine.starts_with("microvm") {
        length.min(3 * GIB)
    } else {
        length
    };
    Split { low_bytes, is_from_cmos: false }
}

/// Bytes below and above 4 GiB, by the CMOS registers in which firmware looks them up: 34/35 hold what lies
/// between 16 MiB and 4 GiB, 5b to 5d what lies above, in units of 64 KiB.
fn cmos_split(cmos: &[u8]) -> Option<(u64, u64)> {
    let byte = |at: usize| cmos.get(at).map(|byte| u64::from(*byte));
    let low = byte(0x34)? | byte(0x35)? << 8;
    let high = byte(0x5b)? | byte(0x5c)? << 8 | byte(0x5d)? << 16;
    (low > 0).then_some(((low << 16) + (16 << 20), high << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const X86: Option<Architecture> = Some(Architecture::X86);

    fn blocks(list: &[(&str, u64)]) -> Vec<MapBlock> {
        list.iter().map(|(name, length)| MapBlock { name: (*name).into(), length_bytes: *length }).collect()
    }

    fn pc(machine_type: &str) -> MapHints<'_> {
        MapHints { architecture: X86, machine_type, ..MapHints::default() }
    }

    fn ranges(map: &MemoryMap) -> Vec<(u64, u64, u64)> {
        map.regions.iter().map(|r| (r.address, r.length_bytes, r.block_offset)).collect()
    }

    #[test]
    fn map_by_machine_type_splits_where_qemu_does() {
        for (machine, mib, low_mib) in [
            ("pc-i440fx-11.1", 3583, 3583),
            ("pc-i440fx-11.1", 3584, 3072),
            ("pc-q35-11.1", 2815, 2815),
            ("pc-q35-11.1", 2816, 2048),
            ("microvm", 3072, 3072),
            ("microvm", 3583, 3072),
            ("isapc", 64, 64),
        ] {
            let blocks = blocks(&[("pc.ram", mib * MIB), ("pc.bios", 256 << 10)]);

            let map = MemoryMap::of(&blocks, &pc(machine));

            let mut expected = vec![(0, low_mib * MIB, 0), (HIGH - (256 << 10), 256 << 10, 0)];
            if low_mib < mib {
                expected.push((HIGH, (mib - low_mib) * MIB, low_mib * MIB));
            }
            assert_eq!(ranges(&map), expected, "{machine} {mib}");
        }
    }

    #[test]
    fn map_cmos_that_fits_the_block_outweighs_the_rule() {
        let mut cmos = [0; 128];
        let low = ((1024 - 16) * MIB) >> 16;
        cmos[0x34..0x36].copy_from_slice(&(low as u16).to_le_bytes());
        cmos[0x5b..0x5d].copy_from_slice(&(((1024 * MIB) >> 16) as u16).to_le_bytes());
        let hints = MapHints { cmos: Some(&cmos), ..pc("pc-i440fx-11.1") };

        let map = MemoryMap::of(&blocks(&[("other", 4096), ("xx", 2048 * MIB)]), &hints);
        let misfit = MemoryMap::of(&blocks(&[("pc.ram", 1024 * MIB)]), &hints);

        assert_eq!(ranges(&map), [(0, 1024 * MIB, 0), (HIGH, 1024 * MIB, 1024 * MIB)]);
        assert_eq!(map.split, Some(Split { low_bytes: 1024 * MIB, is_from_cmos: true }));
        assert_eq!(map.unplaced, [0]);
        assert_eq!(misfit.split, Some(Split { low_bytes: 1024 * MIB, is_from_cmos: false }));
    }

    #[test]
    fn map_placed_block_wins_and_overlaps_are_refused() {
        let blocks = blocks(&[("pc.ram", 64 * MIB), ("d0", 4 * MIB), ("d1", 4 * MIB), ("d2", 4 * MIB)]);
        let placed = vec![(1, HIGH), (2, 63 * MIB), (3, u64::MAX - 4095), (9, 0)];
        let hints = MapHints { placed, ..pc("pc-i440fx-11.1") };

        let map = MemoryMap::of(&blocks, &hints);

        assert_eq!(ranges(&map), [(63 * MIB, 4 * MIB, 0), (HIGH, 4 * MIB, 0)]);
        assert_eq!(map.unplaced, [0, 3]);
        assert_eq!(
            map.at(HIGH + 4096).map(|r| (r.block, r.block_offset, r.length_bytes)),
            Some((1, 4096, 4 * MIB - 4096))
        );
        assert_eq!(map.at(HIGH + 4 * MIB), None);
        assert_eq!(map.at(0), None);
    }

    #[test]
    fn map_of_several_backends_leaves_them_out() {
        let map = MemoryMap::of(
            &blocks(&[("a", MIB), ("b", MIB), ("/rom@etc/acpi/tables", MIB)]),
            &pc("pc-q35-11.1"),
        );

        assert!(map.regions.is_empty());
        assert_eq!(map.unplaced, [0, 1, 2]);
    }

    #[test]
    fn map_of_a_machine_that_is_no_pc_has_its_ram_where_the_board_has_it_or_nowhere() {
        use Architecture::{Aarch64, Riscv64, S390x};
        for (machine_type, block, architecture, base) in [
            ("virt", "riscv_virt_board.ram", None, None),
            ("virt", "riscv_virt_board.ram", Some(Riscv64), Some(2 << 30)),
            ("virt-10.0", "mach-virt.ram", Some(Aarch64), Some(1 << 30)),
            ("sbsa-ref", "ram", Some(Aarch64), None),
            ("raspi3b", "ram", Some(Aarch64), None),
            ("s390-ccw-virtio-10.0", "s390.ram", Some(S390x), Some(0)),
        ] {
            let hints = MapHints { architecture, machine_type, ..MapHints::default() };

            let map = MemoryMap::of(&blocks(&[(block, 64 * MIB), ("pc.bios", MIB)]), &hints);

            let expected: Vec<_> = base.map(|base| (base, 64 * MIB, 0)).into_iter().collect();
            assert_eq!(ranges(&map), expected, "{machine_type}");
            assert_eq!((map.assumed_base, map.split), (base, None), "{machine_type}");
            assert_eq!(map.unplaced_main, if base.is_none() { Some(0) } else { None }, "{machine_type}");
        }
    }
}
