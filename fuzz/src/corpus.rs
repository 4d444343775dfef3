//! Stored inputs: `fuzz/stored/TARGET.zst` for inputs found by exploring, `fuzz/regressions/TARGET/` for
//! inputs that found bugs, now fixed.
//!
//! A file of stored inputs is one zstd frame of records: length (4 bytes, big endian), then the bytes. Inputs
//! of a target resemble each other. One frame is therefore much smaller than separately compressed inputs.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Size limit of a file of stored inputs, in bytes.
pub const MOST_STORED_BYTES: usize = 256 << 10;
/// Limit of all unpacked inputs of a target, in bytes.
const MOST_BYTES: u64 = 256 << 20;
/// A slow level, because packing is rare. The window covers all inputs of most targets.
const LEVEL: i32 = 19;
const WINDOW_LOG: u32 = 26;

/// The directory that contains `stored`, `regressions` and `artifacts`.
pub fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Path of the file with the stored inputs of `target`.
pub fn stored_file(target: &str) -> PathBuf {
    directory().join("stored").join(format!("{target}.zst"))
}

/// Reads every input of `target`: stored inputs, regressions, and the files in `seeds/TARGET`. They are sorted
/// by length and bytes, so that the order does not depend on file names.
///
/// # Errors
/// An error of the operating system, or a damaged file of stored inputs.
pub fn all(target: &str, seeds: Option<&Path>) -> io::Result<Vec<Vec<u8>>> {
    let mut inputs = match fs::read(stored_file(target)) {
        Ok(bytes) => unpack(&bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    inputs.extend(read(&directory().join("regressions").join(target))?);
    if let Some(seeds) = seeds {
        inputs.extend(read(&seeds.join(target))?);
    }
    Ok(sorted(inputs))
}

/// Reads the files of a directory. A missing directory has none.
///
/// # Errors
/// An error of the operating system.
pub fn read(directory: &Path) -> io::Result<Vec<Vec<u8>>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    entries.map(|entry| fs::read(entry?.path())).collect()
}

fn sorted(inputs: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let unique: BTreeSet<(usize, Vec<u8>)> = inputs.into_iter().map(|input| (input.len(), input)).collect();
    unique.into_iter().map(|(_, input)| input).collect()
}

/// Packs `inputs` into at most `most` bytes. Also returns how many of the longest inputs were left out.
///
/// # Errors
/// If zstd fails.
pub fn pack(inputs: Vec<Vec<u8>>, most: usize) -> io::Result<(Vec<u8>, usize)> {
    let inputs = sorted(inputs);
    let mut kept = inputs.len();
    loop {
        let mut records = Vec::new();
        for input in &inputs[..kept] {
            records.extend_from_slice(&(input.len() as u32).to_be_bytes());
            records.extend_from_slice(input);
        }
        let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
        compressor.long_distance_matching(true)?;
        compressor.window_log(WINDOW_LOG)?;
        compressor.include_checksum(true)?;
        let packed = compressor.compress(&records)?;
        if packed.len() <= most || kept == 0 {
            return Ok((packed, inputs.len() - kept));
        }
        // Estimates the room from the ratio of the limit to the packed size, less 3 %, so that few repetitions
        // suffice.
        let mut room = (records.len() as f64 * 0.97 * most as f64 / packed.len() as f64) as usize;
        let fits = |input: &&Vec<u8>| {
            room = room.saturating_sub(input.len() + 4);
            room > 0
        };
        kept = inputs[..kept].iter().take_while(fits).count().min(kept - 1);
    }
}

/// Returns the inputs that [`pack`] packed.
///
/// # Errors
/// If the bytes are damaged.
pub fn unpack(packed: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
    decoder.window_log_max(WINDOW_LOG + 1)?;
    let mut records = Vec::new();
    decoder.take(MOST_BYTES).read_to_end(&mut records)?;
    let (mut inputs, mut rest) = (Vec::new(), &records[..]);
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        let (input, behind) = behind
            .split_at_checked(length)
            .ok_or_else(|| io::Error::other("the last of the stored inputs is cut off"))?;
        inputs.push(input.to_vec());
        rest = behind;
    }
    if rest.is_empty() { Ok(inputs) } else { Err(io::Error::other("bytes behind the stored inputs")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpack_of_what_pack_made_is_every_input_once_by_length() {
        let inputs = vec![vec![1; 300], b"b".to_vec(), Vec::new(), b"a".to_vec(), vec![1; 300]];

        let (packed, left_out) = pack(inputs, 1000).unwrap();

        let wanted = vec![Vec::new(), b"a".to_vec(), b"b".to_vec(), vec![1; 300]];
        assert_eq!((unpack(&packed).unwrap(), left_out), (wanted, 0));
        assert!(unpack(&packed[..packed.len() - 1]).is_err());
    }

    #[test]
    fn pack_into_too_few_bytes_leaves_out_the_longest() {
        let mut draw = 1u64;
        let mut noise = |length: usize| -> Vec<u8> {
            (0..length)
                .map(|_| {
                    draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (draw >> 56) as u8
                })
                .collect()
        };
        let inputs: Vec<_> = (1..40).map(|n| noise(n * 10)).collect();

        let (packed, left_out) = pack(inputs.clone(), 2000).unwrap();

        let kept = unpack(&packed).unwrap();
        assert!(packed.len() <= 2000 && left_out > 0 && kept.len() > 10, "{left_out} {}", kept.len());
        assert_eq!(kept, inputs[..inputs.len() - left_out]);
    }
}
