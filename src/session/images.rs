//! Images made fit for a model: checked, and scaled down when they are larger than models look at.
//!
//! The bytes come from inside and may be a bomb, so sizes are checked before anything is decoded, and decoding has a memory limit.
//! This is work for the processor; call it where blocking is allowed.

use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use image::imageops::FilterType;
use image::{DynamicImage, ImageFormat, ImageReader, Limits};

use super::Image;

/// Models scale down what is larger on a side, so more would only cost.
const LONGEST_SIDE: u32 = 1568;
/// Larger images are refused by clients once they are written as text (5 MB).
const MOST_BYTES: usize = 3_750_000;
/// More pixels on a side are a mistake or an attack.
const LARGEST_SIDE_READ: u32 = 20_000;
const DECODING_MEMORY: u64 = 256 * 1024 * 1024;

/// Why an image cannot be shown, as the end of the sentence "an image is not shown because …".
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadImage {
    #[error("its bytes are not a readable PNG or JPEG")]
    Corrupt,
    #[error("it is too large to be read ({width} × {height} pixels)")]
    TooLarge { width: u32, height: u32 },
}

/// Checks an image and scales it down if need be.
pub(super) fn develop(bytes: Vec<u8>) -> Result<Image, BadImage> {
    let (format, mime) = match image::guess_format(&bytes) {
        Ok(ImageFormat::Png) => (ImageFormat::Png, "image/png"),
        Ok(ImageFormat::Jpeg) => (ImageFormat::Jpeg, "image/jpeg"),
        _ => return Err(BadImage::Corrupt),
    };
    let reader = || ImageReader::with_format(Cursor::new(&bytes), format);
    let (width, height) = reader().into_dimensions().map_err(|_| BadImage::Corrupt)?;
    if width > LARGEST_SIDE_READ || height > LARGEST_SIDE_READ {
        return Err(BadImage::TooLarge { width, height });
    }
    let mut limits = Limits::default();
    limits.max_alloc = Some(DECODING_MEMORY);
    let mut reader = reader();
    reader.limits(limits);
    let decoded = reader.decode().map_err(|error| match error {
        image::ImageError::Limits(_) => BadImage::TooLarge { width, height },
        _ => BadImage::Corrupt,
    })?;
    if width <= LONGEST_SIDE && height <= LONGEST_SIDE && bytes.len() <= MOST_BYTES {
        return Ok(Image { mime, bytes, width, height, scaled_from: None });
    }
    scale_down(decoded, format, mime)
}

fn scale_down(original: DynamicImage, format: ImageFormat, mime: &'static str) -> Result<Image, BadImage> {
    let scaled_from = Some((original.width(), original.height()));
    let mut side = LONGEST_SIDE.min(original.width().max(original.height()));
    loop {
        let scaled = original.resize(side, side, FilterType::Triangle);
        let mut bytes = Vec::new();
        match format {
            ImageFormat::Jpeg => scaled.write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, 85)),
            _ => scaled.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png),
        }
        .map_err(|_| BadImage::Corrupt)?;
        if bytes.len() <= MOST_BYTES || side < 64 {
            return Ok(Image { mime, bytes, width: scaled.width(), height: scaled.height(), scaled_from });
        }
        side = side * 3 / 4;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A PNG whose pixels do not compress well when `noisy`.
    pub(in crate::session) fn png(width: u32, height: u32, noisy: bool) -> Vec<u8> {
        let mut state = 1u32;
        let picture = image::RgbImage::from_fn(width, height, |_, _| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if noisy {
                image::Rgb([(state >> 24) as u8, (state >> 16) as u8, (state >> 8) as u8])
            } else {
                image::Rgb([9, 9, 9])
            }
        });
        let mut bytes = Vec::new();
        picture.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png).unwrap();
        bytes
    }

    #[test]
    fn a_small_image_passes_unchanged() {
        let bytes = png(64, 48, false);
        let image = develop(bytes.clone()).unwrap();
        assert_eq!((image.mime, image.width, image.height, image.scaled_from), ("image/png", 64, 48, None));
        assert_eq!(image.bytes, bytes);
    }

    #[test]
    fn a_large_image_is_scaled_and_keeps_its_shape() {
        let image = develop(png(3136, 784, false)).unwrap();
        assert_eq!((image.width, image.height, image.scaled_from), (1568, 392, Some((3136, 784))));
    }

    #[test]
    fn an_image_with_too_many_bytes_is_scaled_until_it_fits() {
        let bytes = png(1400, 1200, true);
        assert!(bytes.len() > MOST_BYTES);
        let image = develop(bytes).unwrap();
        assert!(image.bytes.len() <= MOST_BYTES);
        assert_eq!(image.scaled_from, Some((1400, 1200)));
    }

    #[test]
    fn corrupt_bytes_and_bombs_are_refused() {
        assert_eq!(develop(b"no image".to_vec()), Err(BadImage::Corrupt));
        let mut cut = png(64, 48, true);
        cut.truncate(cut.len() / 2);
        assert_eq!(develop(cut), Err(BadImage::Corrupt));
        let mut bomb = png(64, 48, false);
        bomb[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        let checksum = crc32(&bomb[12..29]).to_be_bytes();
        bomb[29..33].copy_from_slice(&checksum);
        assert_eq!(develop(bomb), Err(BadImage::TooLarge { width: 65536, height: 65536 }));
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |sum, byte| {
            (0..8).fold(sum ^ u32::from(*byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 })
        })
    }
}
