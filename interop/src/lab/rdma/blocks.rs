//! Memory for a machine from a QEMU: blocks with the same names and lengths.

use serde_json::{Value, json};
use sterna_ram::{Backing, GuestRam, RamBlock};

use crate::Failure;
use crate::qemu::Qemu;

/// Untouched memory with that QEMU's blocks.
pub(super) fn blocks_of(qemu: &mut Qemu) -> Result<GuestRam, Failure> {
    made(table_of(qemu)?.into_iter())
}

/// Names and lengths of that QEMU's blocks.
pub(super) fn table_of(qemu: &mut Qemu) -> Result<Vec<(String, u64)>, Failure> {
    let table = told(qemu)?;
    let blocks: Vec<_> =
        table.lines().filter_map(block).map(|block| (block.name, block.length_bytes)).collect();
    if blocks.is_empty() { Err(format!("no blocks in {table:?}")) } else { Ok(blocks) }
}

/// Address of the block with this name in that QEMU's memory.
pub(super) fn address_of(qemu: &mut Qemu, name: &str) -> Result<u64, Failure> {
    let found = told(qemu)?.lines().filter_map(block).find(|block| block.name == name);
    found.map(|block| block.address).ok_or_else(|| format!("QEMU has no block {name:?}"))
}

fn told(qemu: &mut Qemu) -> Result<String, Failure> {
    let told = qemu.execute("human-monitor-command", json!({ "command-line": "info ramblock" }))?;
    let Value::String(table) = told else { return Err(format!("info ramblock: {told}")) };
    Ok(table)
}

/// Untouched memory with these names and lengths.
pub(super) fn made(blocks: impl Iterator<Item = (String, u64)>) -> Result<GuestRam, Failure> {
    let made: Result<Vec<_>, _> =
        blocks.map(|(name, length)| RamBlock::new(name, length, Backing::Anonymous)).collect();
    made.and_then(GuestRam::new).map_err(|error| error.to_string())
}

#[derive(Debug, PartialEq, Eq)]
struct Block {
    name: String,
    length_bytes: u64,
    address: u64,
}

/// Parses a line of the table: name, page size (two words), offset, used length, total length, address,
/// read-only flag.
fn block(line: &str) -> Option<Block> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |at: usize| u64::from_str_radix(words.get(at)?.strip_prefix("0x")?, 16).ok();
    Some(Block { name: words.first()?.to_string(), length_bytes: number(4)?, address: number(6)? })
}

#[cfg(test)]
mod tests {
    use super::{Block, block};

    #[test]
    fn block_is_read_from_qemus_line() {
        let head = "              Block Name    PSize              Offset               Used              Total                HVA  RO";
        let line = "/rom@etc/acpi/tables    4 KiB  0x0000000002080000 0x0000000000020000 0x0000000000200000 0x00007f1b3c200000  ro";

        assert_eq!(block(head), None);
        let name = "/rom@etc/acpi/tables".to_owned();
        assert_eq!(block(line), Some(Block { name, length_bytes: 0x20000, address: 0x7f1b_3c20_0000 }));
    }
}
