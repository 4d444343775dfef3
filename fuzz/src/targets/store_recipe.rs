//! The recipe of a file: a decoded one encodes to bytes that decode alike.

use sterna_store::internals::recipe;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let blocks = [64 << 10, 4096, 100];
    if let Some(again) = recipe(data, &blocks) {
        assert_eq!(recipe(&again, &blocks), Some(again.clone()));
    }
}

/// First inputs: each kind of piece, alone and one after the other, at the ends of blocks, and beyond them.
pub fn seeds() -> Vec<Vec<u8>> {
    let pieces: [&[u8]; 12] = [
        &[0, 100],
        &[0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        &[1, 0, 0, 0x80, 0x20],
        &[1, 2, 0, 100],
        &[1, 2, 2, 99],
        &[1, 2, 0, 101],
        &[1, 1, 1, 1],
        &[1, 3, 0, 1],
        &[2, 0, 0, 2],
        &[2, 0, 30, 1],
        &[3, 4, 2],
        &[3, 0, 1],
    ];
    let mut seeds: Vec<Vec<u8>> = pieces.iter().map(|piece| piece.to_vec()).collect();
    for first in &pieces {
        for second in &pieces {
            seeds.push([*first, *second].concat());
        }
    }
    seeds.push([pieces[0], pieces[2], pieces[8], pieces[10], pieces[3]].concat());
    seeds.push(vec![4]);
    seeds
}
