//! Reads a VMM's file out of an image, byte for byte.

use std::sync::Arc;

use super::image::StoredImage;
use crate::error::StoreError;
use crate::layout::Rule;
use crate::recipe::{self, Piece, Recipe};

/// Limit of a file's recipe in bytes.
const RECIPE_MOST: u64 = 256 << 20;

/// A file of an image, for reads at random. Several threads may read.
#[derive(Debug, Clone)]
pub struct FileReader {
    image: Arc<StoredImage>,
    recipe: Arc<Recipe>,
}

impl StoredImage {
    /// Opens a file of the image for reads at random; none if the image has no file of this name.
    ///
    /// # Errors
    /// [`StoreError::Broken`] if the file's recipe breaks a rule; the errors of [`frame`](Self::frame).
    pub fn file(self: &Arc<Self>, name: &str) -> Result<Option<FileReader>, StoreError> {
        let Some(file) = self.index.files.iter().find(|file| file.name == name) else { return Ok(None) };
        let broken = |rule: Rule| StoreError::Broken {
            name: self.name().to_owned(),
            part: "a recipe",
            rule: rule.0,
            paragraph: rule.1,
        };
        let (offset, length) = file.recipe;
        if length > RECIPE_MOST {
            return Err(broken((format!("the recipe of {name:?} has {length} bytes"), "§6")));
        }
        let mut bytes = vec![0; length as usize];
        self.read(self.index.blocks.len() - 1, offset, &mut bytes)?;
        let blocks: Vec<u64> = self.index.blocks.iter().map(|block| block.length_bytes).collect();
        let recipe = Recipe::decode(&bytes, &blocks).map_err(broken)?;
        if recipe.length() != file.length_bytes {
            let rule =
                format!("the recipe of {name:?} makes {} bytes, not {}", recipe.length(), file.length_bytes);
            return Err(broken((rule, "§6")));
        }
        Ok(Some(FileReader::new(Arc::clone(self), recipe)))
    }
}

impl FileReader {
    fn new(image: Arc<StoredImage>, recipe: Recipe) -> Self {
        Self { image, recipe: Arc::new(recipe) }
    }

    /// The image that has the file.
    pub fn image(&self) -> &Arc<StoredImage> {
        &self.image
    }

    /// How the file is put together.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Length of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.recipe.length()
    }

    /// Reads into `to` from byte `offset`, up to the end of the file. Returns the number of bytes.
    ///
    /// # Errors
    /// The errors of [`StoredImage::frame`].
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<usize, StoreError> {
        let rest = self.len_bytes().saturating_sub(offset).min(to.len() as u64) as usize;
        let (mut at, mut done) = (offset, 0);
        for (start, piece) in &self.recipe.pieces()[self.recipe.at(offset)..] {
            if done == rest {
                break;
            }
            let skip = at - start;
            let length = piece.length().unwrap_or(0).saturating_sub(skip);
            let count = length.min((rest - done) as u64) as usize;
            self.piece(*piece, skip, &mut to[done..done + count])?;
            at += count as u64;
            done += count;
        }
        Ok(done)
    }

    fn piece(&self, piece: Piece, skip: u64, to: &mut [u8]) -> Result<(), StoreError> {
        match piece {
            Piece::Hole { .. } => to.fill(0),
            Piece::Copy { block, offset, .. } => self.image.read(block as usize, offset + skip, to)?,
            Piece::PageRecords { .. } | Piece::ZeroRecords { .. } => {
                let mut read =
                    |block: u32, offset, to: &mut [u8]| self.image.read(block as usize, offset, to);
                recipe::records(piece, skip, to, &mut read)?;
            }
        }
        Ok(())
    }
}
