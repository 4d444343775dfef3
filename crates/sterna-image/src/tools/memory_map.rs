//! Maps the blocks of an image to the guest's physical memory.
//!
//! An image contains the length of the machine's RAM, but not its address. PC machines leave a hole for devices below
//! 4 GiB and put the remaining RAM after it. Firmware reads the length of the lower part from the CMOS memory of the
//! real-time clock. This module does the same: the clock's state is in the image, in fields that the description
//! names. Without them, the rule of the machine type decides, as observed on QEMU 11.1:
//!
//! | machine | if RAM is | RAM below 4 GiB |
//! | --- | --- | --- |
//! | `pc-i440fx-*` | at least 3.5 GiB | 3 GiB |
//! | `pc-q35-*` | at least 2.75 GiB | 2 GiB |
//! | `microvm` | above 3 GiB | 3 GiB |
//!
//! The firmware (`pc.bios`) ends at 4 GiB. The early section of a virtio-mem device contains its address. Machines of
//! other architectures have their RAM in one piece ([`Architecture::ram_base`]). Blocks without a known address are
//! left out and reported: DIMMs, the backends of several NUMA nodes, video memory, the RAM of an unknown machine.

use super::architecture::Architecture;

/// Address of the RAM that does not fit below the hole.
const HIGH: u64 = 4 << 30;

/// The properties of a block that a map needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapBlock {
    /// Name of the block.
    pub name: String,
    /// Length of the block in bytes.
    pub length_bytes: u64,
}

/// A range of physical addresses that belongs to one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Region {
    /// First guest physical address.
    pub address: u64,
    /// Length of the range in bytes.
    pub length_bytes: u64,
    /// Index of the block in the image.
    pub block: usize,
    /// Offset of the range in the block, in bytes.
    pub block_offset: u64,
}

/// Ranges of physical addresses, in ascending order, without overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct MemoryMap {
    /// The ranges of blocks with a known address.
    pub regions: Vec<Region>,
    /// Indices of blocks whose address is unknown.
    pub unplaced: Vec<usize>,
    /// The machine's RAM block, if its address is unknown. Any address without a region may belong to it.
    pub unplaced_main: Option<usize>,
    /// Address of the machine's RAM, if only the machine type determines it.
    pub assumed_base: Option<u64>,
    /// The part of the machine's RAM below 4 GiB; none for machines without a split.
    pub split: Option<Split>,
}

/// The split of the machine's RAM at the hole below 4 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Split {
    /// Bytes of RAM below 4 GiB.
    pub low_bytes: u64,
    /// Whether the value is from the guest's CMOS memory. Otherwise it follows the machine type's rule.
    pub is_from_cmos: bool,
}

/// Known properties of a machine, for its map.
#[derive(Debug, Clone, Default)]
pub struct MapHints<'a> {
    /// The architecture, if known. Only x86 machines have the hole below 4 GiB.
    ///
    /// Without the architecture, the address of the machine's RAM is unknown.
    pub architecture: Option<Architecture>,
    /// Machine type, such as `pc-q35-11.1`.
    pub machine_type: &'a str,
    /// CMOS memory of the real-time clock; none if it is not in the image.
    pub cmos: Option<&'a [u8]>,
    /// Blocks with a certain address, from the user or from a device's state.
    pub placed: Vec<(usize, u64)>,
}

impl MemoryMap {
    /// Makes the map of a machine.
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

    /// The part of a region from `address` to the region's end; none outside all regions.
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

    /// Adds a region, unless it overlaps another one.
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

/// The block that is the machine's RAM.
///
/// Criteria, in this order: its usual name, the length in CMOS memory, the only block that belongs to no device.
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
    // Several blocks may be NUMA nodes. Their order is not in the image.
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

/// Bytes of RAM below and above 4 GiB, from the CMOS registers that firmware reads.
///
/// Registers 0x34 and 0x35 contain the RAM between 16 MiB and 4 GiB, 0x5b to 0x5d the RAM above. The unit is 64 KiB.
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
