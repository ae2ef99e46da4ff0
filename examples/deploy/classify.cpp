// Classify an image with a file of `softline export ... --preprocess` and ONNX Runtime alone:
//
//     g++ -std=c++17 -I ONNXRUNTIME/include classify.cpp -L ONNXRUNTIME/lib -lonnxruntime -o classify
//     ./classify clothes_bytes.onnx shoe.pgm
//
// The image is a binary PPM (colour) or PGM (grey) file of 8 bits, of a size that the network was exported for.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

struct Image {
    int64_t height = 0, width = 0, channels = 0;
    std::vector<uint8_t> pixels;  // [height, width, channels]
};

Image read_image(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string kind;
    Image image;
    int64_t largest = 0;
    file >> kind >> image.width >> image.height >> largest;
    if (!file || (kind != "P5" && kind != "P6") || image.width < 1 || image.height < 1 || largest != 255)
        throw std::runtime_error(path + " is no binary PPM or PGM file of 8 bits without comments");
    file.get();  // one blank follows the header
    image.channels = kind == "P6" ? 3 : 1;
    image.pixels.resize(image.height * image.width * image.channels);
    file.read(reinterpret_cast<char*>(image.pixels.data()), image.pixels.size());
    if (!file) throw std::runtime_error(path + " is truncated");
    return image;
}

// Strings of a JSON list; escapes other than \" and \\ stay as they are.
std::vector<std::string> read_names(const std::string& json) {
    std::vector<std::string> names;
    bool inside = false;
    for (size_t at = 0; at < json.size(); ++at) {
        if (json[at] == '"') {
            inside = !inside;
            if (inside) names.emplace_back();
        } else if (inside) {
            if (json[at] == '\\' && (json[at + 1] == '"' || json[at + 1] == '\\')) ++at;
            names.back() += json[at];
        }
    }
    return names;
}

std::vector<float> softmax(const float* logits, size_t count) {
    const float largest = *std::max_element(logits, logits + count);
    std::vector<float> found(count);
    std::transform(logits, logits + count, found.begin(), [&](float logit) { return std::exp(logit - largest); });
    const float sum = std::accumulate(found.begin(), found.end(), 0.0f);
    for (float& value : found) value /= sum;
    return found;
}

void classify(const char* model, const char* file) {
    Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
    Ort::Session session(env, model, Ort::SessionOptions());
    Ort::AllocatorWithDefaultOptions allocator;
    const auto stored = session.GetModelMetadata().LookupCustomMetadataMapAllocated("classes", allocator);
    const std::vector<std::string> classes = stored ? read_names(stored.get()) : std::vector<std::string>();

    Image image = read_image(file);
    const std::array<int64_t, 4> shape = {1, image.height, image.width, image.channels};
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const auto input = Ort::Value::CreateTensor<uint8_t>(
        memory, image.pixels.data(), image.pixels.size(), shape.data(), shape.size());
    const char* inputs[] = {"pixels"};
    const char* outputs[] = {"logits"};
    const auto results = session.Run(Ort::RunOptions(), inputs, &input, 1, outputs, 1);
    const size_t count = results[0].GetTensorTypeAndShapeInfo().GetElementCount();
    const std::vector<float> found = softmax(results[0].GetTensorData<float>(), count);

    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return found[a] > found[b]; });
    for (size_t rank = 0; rank < std::min<size_t>(count, 5); ++rank) {
        const size_t label = order[rank];
        const std::string name = label < classes.size() ? classes[label] : std::to_string(label);
        std::printf("%8.4f %%  %s\n", 100 * found[label], name.c_str());
    }
}

int main(int count, char** words) {
    if (count != 3) {
        std::fprintf(stderr, "usage: %s MODEL.onnx IMAGE.ppm\n", words[0]);
        return 2;
    }
    try {
        classify(words[1], words[2]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
    return 0;
}
